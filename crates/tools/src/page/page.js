'use strict';
const page = JSON.parse(document.getElementById('data').textContent);
const at = id => document.getElementById(id);
let bucket = 0, graph = 0, pinned = null;

// Everything from the data enters the page as text, never as markup.
function make(tag, attributes = {}, ...children) {
  const svg = ['svg', 'g', 'rect', 'text', 'tspan', 'path', 'title'].includes(tag);
  const element = svg ? document.createElementNS('http://www.w3.org/2000/svg', tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const us = x => `${x.toFixed(x < 10 ? 2 : 1)} µs`;
const plural = (n, word) => `${n} ${word}${n === 1 ? '' : 'es'}`;
// The golden angle keeps neighbours apart.
const hue = group => `--hue: ${Math.round((25 + group * 137.5) % 360)}`;
const shown = () => page.buckets[bucket].graphs[graph];

function choices(nav, names, chosen, choose) {
  nav.replaceChildren(...names.map((name, i) =>
    make('button', { type: 'button', 'aria-pressed': String(i === chosen), onclick: () => { choose(i); pinned = null; draw(); } }, name)));
}

function curve(points) {
  let path = `M${points[0]}`;
  for (let i = 1; i < points.length; i++) {
    const [[x0, y0], [x1, y1]] = [points[i - 1], points[i]];
    const middle = (y0 + y1) / 2;
    path += ` C${x0},${middle} ${x1},${middle} ${x1},${y1}`;
  }
  return path;
}

function drawGraph(side) {
  const { size, nodes, edges } = shown()[side];
  const svg = make('svg', { width: size[0] + 4, viewBox: `-2 -2 ${size[0] + 4} ${size[1] + 4}`, role: 'img', 'aria-label': `the graph ${side} fusion` });
  for (const edge of edges) {
    const [x, y] = edge.points.at(-1);
    const points = [...edge.points.slice(0, -1), [x, y - 5]];
    const groups = nodes[edge.from].groups.filter(g => nodes[edge.to].groups.includes(g));
    svg.append(make('g', { 'data-groups': groups.join(' ') },
      make('path', { class: 'edge', d: curve(points) }, make('title', {}, edge.value)),
      make('path', { class: 'head', d: `M${x - 3.5},${y - 6} L${x + 3.5},${y - 6} L${x},${y} Z` })));
  }
  for (const node of nodes) {
    const [x, y, width, height] = node.rect;
    const group = node.groups[0];
    const hover = () => { if (pinned === null) focus(node.groups, node); };
    const pin = () => { pinned = node.groups; focus(node.groups, node); };
    svg.append(make('g', {
      class: `node ${node.kind}${group === undefined ? '' : ' grouped'}`, style: group === undefined ? null : hue(group),
      transform: `translate(${x},${y})`, tabindex: 0, 'data-groups': node.groups.join(' '), 'aria-label': node.lines.join(' '),
      onmouseenter: hover, onfocus: hover, onclick: event => { event.stopPropagation(); pin(); },
    },
    make('rect', { width, height, rx: 6 }),
    make('text', { x: 10, y: 7 }, ...node.lines.map((line, i) =>
      make('tspan', { x: 10, dy: i ? 16 : 12, class: i ? 'value' : 'name' }, line)))));
  }
  svg.addEventListener('mouseleave', () => { if (pinned === null) focus([], null); });
  at(side).replaceChildren(svg);
}

// Both graphs are as large as each fits its place, times this.
let zoom = 1;

function scale(to) {
  zoom = Math.min(Math.max(to, 0.5), 12);
  for (const canvas of document.querySelectorAll('.canvas')) {
    const svg = canvas.querySelector('svg'), before = svg.getBoundingClientRect().width;
    const middle = [canvas.scrollLeft + canvas.clientWidth / 2, canvas.scrollTop + canvas.clientHeight / 2];
    Object.assign(svg.style, { width: '', maxWidth: '', minWidth: '' });
    if (zoom !== 1) Object.assign(svg.style, { width: `${svg.getBoundingClientRect().width * zoom}px`, maxWidth: 'none', minWidth: '0' });
    // What was in the middle stays there.
    const ratio = svg.getBoundingClientRect().width / before;
    canvas.scrollTo(middle[0] * ratio - canvas.clientWidth / 2, middle[1] * ratio - canvas.clientHeight / 2);
  }
}

const zoomButton = (label, name, to) => make('button', { type: 'button', 'aria-label': name, onclick: event => { event.stopPropagation(); scale(to()); } }, label);
at('zoom').replaceChildren(zoomButton('−', 'Smaller', () => zoom / 1.5), zoomButton('Fit', 'As large as fits', () => 1), zoomButton('+', 'Larger', () => zoom * 1.5));

// Lights the nodes of these groups in both graphs.
function focus(groups, node) {
  for (const svg of document.querySelectorAll('.canvas svg')) {
    svg.classList.toggle('focused', groups.length > 0);
    for (const part of svg.children) {
      const mine = part.dataset.groups.split(' ').filter(Boolean).map(Number);
      const lit = mine.some(g => groups.includes(g));
      part.classList.toggle('lit', lit && part.classList.contains('node'));
      part.querySelector('.edge')?.classList.toggle('lit', lit);
    }
  }
  for (const row of document.querySelectorAll('.record')) row.classList.toggle('lit', groups.includes(Number(row.dataset.group ?? -1)));
  at('details').replaceChildren(...(node || groups.length ? details(groups, node) : [hint()]));
}

const hint = () => make('p', { class: 'hint' }, 'Calls of one colour compute the same before and after. Point at one to see what it replaced; click to keep it. A dashed box costs nothing: it is an input or a view.');
const table = pairs => make('dl', {}, ...pairs.flatMap(([name, value]) => [make('dt', {}, name), make('dd', {}, value)]));

function details(groups, node) {
  const out = [];
  if (node) {
    out.push(make('h3', {}, node.op), make('p', { class: 'loc' }, node.loc ?? ''));
    out.push(table([...node.results.map((r, i) => [i ? '' : 'gives', r]), ...node.constants, ...node.attrs]));
    if (node.kind === 'op') out.push(make('p', {}, `${us(node.cost_us)} a call (estimated)`));
  }
  for (const g of groups) {
    const { ops, launches, cost_us } = shown().groups[g];
    const saved = cost_us[0] - cost_us[1];
    out.push(make('h4', {}, ops.join(' + ') || 'nothing is launched'));
    out.push(make('p', {}, `${plural(launches[0], 'launch')} became ${launches[1]}; ${us(cost_us[0])} became ${us(cost_us[1])}: ${us(saved)} saved`));
    for (const fired of shown().fired.filter(f => f.group === g && f.outcome === 'kept')) {
      out.push(make('h4', {}, 'rule ', make('code', {}, fired.rule)), lines(fired), table(fired.bindings.filter(b => b[1] !== 'none')));
    }
    const stones = shown().fired.filter(f => f.group === g && f.outcome.absorbed).map(f => f.rule);
    if (stones.length) out.push(make('h4', {}, 'on the way'), make('p', {}, make('code', {}, [...new Set(stones)].join(', '))));
  }
  return out;
}

const lines = fired => make('div', {}, ...fired.replaced.map(call =>
  make('p', {}, make('code', {}, `${call.op} %${call.value} `), make('span', { class: 'loc' }, call.loc ?? 'made by a rule'))));

const names = { fired: 'fired', absorbed: 'absorbed', lost: 'lost on cost', refused: 'refused', near: 'near miss' };

// What there is to tell of this graph: kind, record, lines of text, and places if more than its own.
function records() {
  const { fired, refused, near_misses } = shown();
  const all = fired.map(f => {
    const { absorbed, dropped } = f.outcome;
    if (absorbed) return ['absorbed', f, [`became part of ${absorbed.into}: ${absorbed.by} went on from it`]];
    if (!dropped) return ['fired', f, [`${f.replaced.map(c => c.op).join(', ')} → ${f.made.join(', ')}`], [...new Set(f.replaced.map(c => c.loc).filter(Boolean))].join('  ')];
    const price = dropped.by_us === null ? 'dearer' : `${us(dropped.by_us)} dearer a call`;
    return ['lost', f, [`${f.made.join(', ')} would be ${price}${dropped.instead ? `; ${dropped.instead} computes it` : ''}`]];
  });
  refused.forEach(r => all.push(['refused', r, [`needs ${r.condition}`, ...r.values.map(v => `but ${v[0]} = ${v[1]}`)]]));
  near_misses.forEach(n => all.push(['near', n, [`${n.matched.join(', ')} matched (${n.matched.length} of ${n.statements}); then ${n.expected} was expected, found ${n.found}`]]));
  const order = Object.keys(names);
  return all.sort((a, b) => order.indexOf(a[0]) - order.indexOf(b[0]));
}

function list() {
  const form = at('filter'), wanted = form.elements.text.value.toLowerCase();
  const rows = records()
    .filter(([kind, r, said, places]) => form.elements[kind].checked && [r.rule, r.site.value, r.site.loc, ...said, places].join(' ').toLowerCase().includes(wanted))
    .map(([kind, r, said, places]) => {
      const linked = r.group !== null;
      return make('div', { class: `record${linked ? ' linked' : ''}`, 'data-group': r.group, style: linked ? hue(r.group) : null,
        onclick: linked && (event => { event.stopPropagation(); pinned = [r.group]; focus(pinned, null); }) },
      make('span', { class: `what ${kind}` }, names[kind]),
      make('code', {}, ...(linked ? [make('span', { class: 'swatch' })] : []), r.rule),
      make('div', {}, make('p', {}, make('code', {}, `%${r.site.value} `), make('span', { class: 'loc' }, places ?? r.site.loc ?? '')),
        ...said.map(line => make('p', {}, line))));
    });
  at('records').replaceChildren(...(rows.length ? rows : [make('p', { class: 'hint' }, 'Nothing to show.')]));
}

function draw() {
  const { graphs, silent, warnings } = page.buckets[bucket];
  choices(at('buckets'), page.buckets.map(b => b.steps), bucket, i => { bucket = i; });
  choices(at('graphs'), graphs.map(g => g.calls > 1 ? `${g.name} × ${g.calls}` : g.name), graph, i => { graph = i; });
  const { report } = shown();
  if (report) {
    const [[l0, l1], [c0, c1]] = [report.launches, report.cost_us];
    at('summary').replaceChildren(make('b', {}, plural(l0, 'launch')), ` of ${us(c0)} became `, make('b', {}, plural(l1, 'launch')), ` of ${us(c1)}, as costs are estimated. ${warnings.join(' ')}`);
  } else at('summary').replaceChildren('Nothing was fused.');
  at('silent').replaceChildren(...(silent.length ? [make('span', { class: 'hint' }, `Nothing looks like the left side of: ${silent.join(', ')}.`)] : []));
  drawGraph('before');
  drawGraph('after');
  scale(zoom);
  list();
  focus([], null);
}

graph = Math.max(0, page.buckets[0].graphs.findIndex(g => g.calls > 1));
at('filter').addEventListener('input', list);
at('filter').addEventListener('submit', event => event.preventDefault());
document.addEventListener('click', event => { if (!event.target.closest('aside')) { pinned = null; focus([], null); } });
document.addEventListener('keydown', event => { if (event.key === 'Escape') { pinned = null; focus([], null); } });
draw();
