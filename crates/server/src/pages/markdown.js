"use strict";
/* Markdown, as far as models write it, as nodes. A text only ever becomes text and the elements named here; HTML in it
   stays text. The time is linear in the text's length, whatever it says: models can be made to say anything. */

/** How deep quotes and lists nest, and marks within a line; what is deeper stays text. */
const DEEPEST = 12;

/** What was drawn where: the blocks' sources. */
const drawn = new WeakMap();

/** Draws a text. Blocks that are as they were stay, and with them what is selected in them or scrolled. */
function drawMarkdown(into, text) {
  const before = drawn.get(into) ?? [];
  const now = blocks(text.split("\n"), 0);
  let same = 0;
  while (same < before.length && same < now.length && before[same] === now[same].source) same += 1;
  while (into.childNodes.length > same) into.lastChild.remove();
  for (const block of now.slice(same)) into.append(block.make());
  drawn.set(into, now.map((block) => block.source));
}

/* ---- Blocks ---- */

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(\S.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)(?:([-*+])|(\d{1,9})[.)])(?: +|$)/;
const BLANK = /^\s*$/;

/** The kinds of blocks that begin with a line of their own. Each finds where the one at `i` ends and how to make it. */
const KINDS = [fence, heading, rule, quote, list, table];

/** The blocks of these lines: the source of each, and what makes its element of that alone. */
function blocks(lines, depth) {
  const found = [];
  for (let i = 0; i < lines.length;) {
    if (BLANK.test(lines[i])) { i += 1; continue; }
    const { end, make } = special(lines, i, depth) ?? paragraph(lines, i, depth);
    found.push({ source: lines.slice(i, end).join("\n"), make });
    i = end;
  }
  return found;
}

const special = (lines, i, depth) => KINDS.reduce((found, kind) => found ?? kind(lines, i, depth), null);
const contents = (lines, depth) => blocks(lines, depth).map((block) => block.make());

function fence(lines, i) {
  const open = FENCE.exec(lines[i]);
  if (!open) return null;
  const [, marks, language] = open;
  const closes = (line) => {
    const text = line.trim();
    return text.length >= marks.length && text === marks[0].repeat(text.length);
  };
  let end = i + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const indent = lines[i].indexOf(marks);
  const code = lines.slice(i + 1, end).map((line) => outdented(line, indent)).join("\n");
  return { end: Math.min(end + 1, lines.length), make: () => codeFigure(language.trim().slice(0, 60) || "code", code) };
}

function heading(lines, i) {
  const found = HEADING.exec(lines[i]);
  if (!found) return null;
  // The page has a heading of its own above them.
  const level = Math.min(found[1].length + 1, 6);
  return { end: i + 1, make: () => directed(`h${level}`, inline(found[2].trimEnd().replace(/[ \t]#+$/, ""))) };
}

function rule(lines, i) {
  return RULE.test(lines[i]) ? { end: i + 1, make: () => element("hr") } : null;
}

function quote(lines, i, depth) {
  if (depth >= DEEPEST || !QUOTE.test(lines[i])) return null;
  let end = i + 1;
  while (end < lines.length && (QUOTE.test(lines[end]) || continues(lines, end, depth))) end += 1;
  const inner = lines.slice(i, end).map((line) => line.replace(QUOTE, ""));
  return { end, make: () => element("blockquote", "", ...contents(inner, depth + 1)) };
}

function list(lines, i, depth) {
  const first = ITEM.exec(lines[i]);
  if (depth >= DEEPEST || !first) return null;
  const [, { length: indent }, , number] = first;
  const items = [];
  let end = i;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || (item[3] === undefined) !== (number === undefined) || RULE.test(lines[end])) break;
    if (items.length && item[1].length >= indent + 2) break;
    const own = [lines[end].slice(item[0].length)];
    for (end += 1; end < lines.length; end += 1) {
      const line = lines[end];
      // Two columns are enough to be in the item: models are not exact about it.
      const inside = BLANK.test(line) || /^ */.exec(line)[0].length >= indent + 2 || /^\t/.test(line);
      if (!inside && (ITEM.test(line) || !continues(lines, end, depth))) break;
      own.push(outdented(line, item[0].length));
    }
    items.push(own);
  }
  const make = () => {
    const made = element(number === undefined ? "ul" : "ol", "", ...items.map((own) => entry(own, depth + 1)));
    if (number !== undefined) made.start = Number(number);
    return made;
  };
  return { end, make };
}

/** An item of a list; a paragraph that it begins with needs no element of its own. */
function entry(lines, depth) {
  const task = /^\[([ xX])\] /.exec(lines[0]);
  if (task) lines = [(task[1] === " " ? "☐ " : "☑ ") + lines[0].slice(4), ...lines.slice(1)];
  const parts = contents(lines, depth);
  if (parts[0]?.tagName === "P") parts.splice(0, 1, ...parts[0].childNodes);
  return directed("li", parts);
}

function table(lines, i) {
  if (!lines[i].includes("|") || i + 1 >= lines.length) return null;
  const [head, marks] = [cells(lines[i]), cells(lines[i + 1])];
  if (!lines[i + 1].includes("-") || marks.length !== head.length || !marks.every((m) => /^:?-+:?$/.test(m))) return null;
  let end = i + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const align = marks.map((m) => (m.endsWith(":") ? (m.startsWith(":") ? "center" : "right") : ""));
  const row = (tag, texts) => element("tr", "", ...align.map((side, n) => {
    const cell = directed(tag, inline(texts[n] ?? ""));
    cell.style.textAlign = side;
    return cell;
  }));
  const make = () => {
    const body = lines.slice(i + 2, end).map((line) => row("td", cells(line)));
    const made = element("div", "wide", element("table", "", element("thead", "", row("th", head)), element("tbody", "", ...body)));
    made.tabIndex = 0;
    return made;
  };
  return { end, make };
}

/** The cells of a row: `\|` and what stands in code part none. */
function cells(line) {
  const row = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  const parts = [""];
  for (const piece of row.match(/\\\||`[^`]*`|[^|\\`]+|[|\\`]/g) ?? []) {
    if (piece === "|") parts.push("");
    else parts[parts.length - 1] += piece.replaceAll("\\|", "|");
  }
  return parts.map((part) => part.trim());
}

function paragraph(lines, i, depth) {
  let end = i + 1;
  while (end < lines.length && continues(lines, end, depth)) end += 1;
  const text = lines.slice(i, end).map((line) => line.trim()).join("\n");
  return { end, make: () => directed("p", inline(text)) };
}

/** Whether a line goes on with the paragraph before it. A year that ends a sentence begins no list. */
function continues(lines, i, depth) {
  if (BLANK.test(lines[i]) || BLANK.test(lines[i - 1])) return false;
  const line = lines[i];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line)) return false;
  if (depth < DEEPEST && QUOTE.test(line)) return false;
  const item = ITEM.exec(line);
  return !(item && depth < DEEPEST && (item[3] === undefined || item[3] === "1")) && !table(lines, i);
}

/** A line without up to `columns` of the spaces that it begins with. */
function outdented(line, columns) {
  const text = line.replace(/^\t/, "    ");
  return text.slice(Math.min(columns, /^ */.exec(text)[0].length));
}

/** An element whose text runs as its own letters do. */
function directed(tag, children) {
  const made = element(tag, "", ...children);
  made.dir = "auto";
  return made;
}

/* ---- Within a line ---- */

const NEXT = /[\\`*_~[\]<]|https?:\/\//g;
const TARGET = /\(\s{0,9}<?([^\s()<>]{0,2000}(?:\([^\s()<>]{0,200}\)[^\s()<>]{0,2000}){0,9})>?(?:\s{1,9}"[^"\n]{0,200}")?\s{0,9}\)/y;
const ADDRESS = /https?:\/\/[^\s<>"`[\]]+/y;
const ANGLED = /<(https?:\/\/[^\s<>]{1,2000}|mailto:[^\s<>]{1,2000})>/y;
const BREAK = /<br ?\/?>/iy;
const WORD = /[\p{L}\p{N}]/u;
const MARKS = { "*": "em", "**": "strong", _: "em", __: "strong", "~~": "del" };
const SCHEMES = ["http:", "https:", "mailto:"];

/** A link, or none where following it could do more than open a page. */
function link(target, children) {
  let url;
  try { url = new URL(target); } catch { return null; }
  if (!SCHEMES.includes(url.protocol)) return null;
  const made = element("a", "", ...children);
  made.querySelectorAll("a").forEach((inner) => inner.replaceWith(...inner.childNodes));
  return Object.assign(made, { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer" });
}

/** The nodes of a line. Marks that are open are frames of a stack; one that nothing closes becomes text again. */
function inline(text) {
  const frames = [{ mark: "", nodes: [] }];
  const put = (node) => frames.at(-1).nodes.push(node);
  const flatten = (count) => {
    while (frames.length > count) {
      const { mark, nodes } = frames.pop();
      put(mark);
      nodes.forEach(put);
    }
  };
  const close = (at) => { flatten(at + 1); return frames.pop(); };
  const open = (mark) => (frames.length > DEEPEST ? put(mark) : frames.push({ mark, nodes: [] }));
  const sticky = (pattern, from) => { pattern.lastIndex = from; return pattern.exec(text); };
  const lonely = new Set(); // lengths of backticks that close nowhere

  /** Each takes what begins at `i`, and says where it ends. */
  const take = {
    "\\": (i) => {
      // Those before brackets are left to formulas.
      const escapes = /[!-'*-/:-@^_`|~\\]/.test(text[i + 1] ?? "");
      put(escapes ? text[i + 1] : "\\");
      return i + (escapes ? 2 : 1);
    },
    "`": (i) => {
      const { length } = sticky(/`+/y, i)[0];
      const from = i + length;
      for (const run of lonely.has(length) ? [] : text.slice(from).matchAll(/`+/g)) {
        if (run[0].length !== length) continue;
        const code = text.slice(from, from + run.index).replaceAll("\n", " ");
        put(element("code", "", code.startsWith(" ") && code.endsWith(" ") && code.trim() ? code.slice(1, -1) : code));
        return from + run.index + length;
      }
      lonely.add(length);
      put(text.slice(i, from));
      return from;
    },
    "[": (i) => { open("["); return i + 1; },
    "]": (i) => {
      const at = frames.findLastIndex(({ mark }) => mark === "[");
      const target = at > 0 && sticky(TARGET, i + 1);
      if (!target) {
        if (at > 0) flatten(at);
        put("]");
        return i + 1;
      }
      const { nodes } = close(at);
      const made = link(target[1], nodes);
      if (made) put(made);
      else ["[", ...nodes, "]", target[0]].forEach(put);
      return i + 1 + target[0].length;
    },
    "<": (i) => {
      const found = sticky(ANGLED, i) ?? sticky(BREAK, i);
      put(found ? (found[1] ? link(found[1], [found[1]]) ?? found[0] : element("br")) : "<");
      return i + (found?.[0].length ?? 1);
    },
    "http": (i) => {
      const [found] = sticky(ADDRESS, i) ?? [text.slice(i, i + 4)];
      const after = found.includes("(") ? ".,;:!?'*_~" : ".,;:!?'*_~)"; // belongs to the sentence
      let { length } = found;
      while (after.includes(found[length - 1])) length -= 1;
      const address = found.slice(0, length);
      put(link(address, [address]) ?? address);
      return i + address.length;
    },
    marks: (i) => {
      const mark = text[i];
      let end = i;
      while (text[end] === mark) end += 1;
      const [before, after] = [text[i - 1] ?? " ", text[end] ?? " "];
      const tight = mark === "_"; // within a word it is part of a name
      const opens = !/\s/.test(after) && !(tight && WORD.test(before));
      const closes = !/\s/.test(before) && !(tight && WORD.test(after));
      for (let left = end - i; left > 0;) {
        const next = mark.repeat(Math.min(left, 2));
        // Of three, the inner ones close first.
        const at = closes ? frames.findLastIndex((f) => f.mark === next || (left > 2 && f.mark === mark)) : -1;
        const size = at > 0 ? frames[at].mark.length : 0;
        if (size && (frames.length > at + 1 || frames[at].nodes.length)) {
          const { mark: closed, nodes } = close(at);
          put(element(MARKS[closed], "", ...nodes));
          left -= size;
        } else if (opens && MARKS[next]) {
          open(next);
          left -= next.length;
        } else {
          put(mark.repeat(left));
          left = 0;
        }
      }
      return end;
    },
  };

  for (let i = 0; i < text.length;) {
    NEXT.lastIndex = i;
    const found = NEXT.exec(text);
    if (!found) { put(text.slice(i)); break; }
    if (found.index > i) put(text.slice(i, found.index));
    const mark = found[0];
    i = (take[mark] ?? (mark.length > 1 ? take.http : take.marks))(found.index);
  }
  flatten(1);
  return frames[0].nodes;
}
