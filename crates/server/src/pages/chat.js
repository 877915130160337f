"use strict";
/* The chat page. */
const $ = (id) => document.getElementById(id);
const FIELDS = ["system", "temperature", "top_p", "max_tokens", "seed", "tools"];
const narrow = matchMedia("(max-width: 760px)");

/** Conversations in memory by id: the one that is seen, and those whose answer is under way. */
const open = new Map();
/** Answers under way, by conversation. */
const runs = new Map();
/** The places of the answers that are seen, by node. */
const views = new Map();
/** The conversation that is seen. */
let chat;

/* ---- Asking ---- */

function request(chat, node) {
  const list = messages(chat, node, $("system").value.trim());
  const body = { model: $("model").value, messages: list, stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    const value = $(name).valueAsNumber;
    if (!Number.isNaN(value)) body[name] = value;
  }
  if (tools()?.length) body.tools = tools();
  return body;
}

/** The tools that the settings name; null where that is no list. */
function tools() {
  try {
    const list = JSON.parse($("tools").value.trim() || "[]");
    return Array.isArray(list) ? list : null;
  } catch { return null; }
}

/** Streams the answer to a node. Whoever looks at it sees it grow; it also grows where nobody does. */
async function answer(chat, node) {
  stop(chat);
  const run = { node, abort: new AbortController(), start: performance.now(), first: null, last: null, chunks: 0, tokens: null, saved: 0 };
  runs.set(chat, run);
  Object.assign(node, { text: "", thoughts: "", calls: [], problem: "", stats: "", end: "" });
  remember(chat);
  redraw(true);
  let end = "no end was sent";
  try {
    for await (const chunk of chunks(request(chat, node), run.abort.signal)) {
      if (chunk.usage) run.tokens = chunk.usage.completion_tokens;
      const choice = chunk.choices?.[0];
      if (choice?.finish_reason) end = choice.finish_reason;
      if (choice?.delta && take(node, choice.delta)) told(chat, run);
    }
  } catch (error) {
    end = run.abort.signal.aborted ? "stopped" : "failed";
    if (end === "failed") node.problem = said(error);
  } finally {
    if (runs.get(chat) === run) runs.delete(chat);
    node.stats = [...figures(run), ...(ENDS[end] ? [ENDS[end]] : [])].join(" · ");
    node.end = end;
    remember(chat);
    views.get(node)?.draw();
    busy();
  }
}

/** Adds what a chunk says to a node's answer; whether it says something. */
function take(node, { content, reasoning_content: thought, tool_calls: calls }) {
  node.text += content ?? "";
  node.thoughts += thought ?? "";
  for (const { index, id, function: { name, arguments: text } = {} } of calls ?? []) {
    const call = (node.calls[index ?? 0] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id ||= id ?? "";
    call.function.name += name ?? "";
    call.function.arguments += text ?? "";
  }
  return Boolean(content || thought || calls?.length);
}

/** Notes when a piece of an answer came. Now and then the conversation is kept: a browser may end at any time. */
function told(chat, run) {
  run.last = performance.now();
  run.first ??= run.last;
  run.chunks += 1;
  if (run.last - run.saved > 1000) { run.saved = run.last; keep(chat); }
  views.get(run.node)?.soon();
}

function stop(chat) {
  runs.get(chat)?.abort.abort();
  runs.delete(chat);
}

/** Keeps a conversation, if it is not deleted meanwhile. */
function remember(chat) {
  if (open.get(chat.id) !== chat) return;
  if (!keep(chat)) problem("This conversation cannot be kept: the browser has no room, or refuses.");
  drawList();
}

function figures(run) {
  if (run.first === null) return [];
  const tokens = run.tokens ?? run.chunks;
  const seconds = (run.last - run.first) / 1000;
  const list = [`${tokens} token${tokens === 1 ? "" : "s"}`];
  if (tokens > 1 && seconds > 0.002) list.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
  list.push(`first after ${Math.round(run.first - run.start)} ms`);
  return list;
}

const ENDS = { length: "cut at the most tokens", stopped: "stopped", "no end was sent": "broken off", content_filter: "filtered" };

/* ---- Showing ---- */

/** Runs `change` and stays at the end of the conversation if that is what was seen. */
function following(change) {
  const s = $("scroll");
  const atEnd = s.scrollHeight - s.scrollTop - s.clientHeight < 60;
  change();
  if (atEnd) s.scrollTop = s.scrollHeight;
}

/** Draws the conversation anew: at its end, or where it was scrolled to. */
function redraw(atEnd) {
  const { scrollTop } = $("scroll");
  views.clear();
  $("log").replaceChildren();
  for (const node of path(chat)) {
    const view = show(node);
    views.set(node, view);
    $("log").append(view.asked, view.box);
    view.draw();
  }
  $("welcome").hidden = chat.nodes.length > 0;
  $("scroll").scrollTop = atEnd ? $("scroll").scrollHeight : scrollTop;
  busy();
}

/** What folds, with a line that says what it is. */
function fold(summary, ...children) {
  return element("details", "", element("summary", "", ...summary), ...children);
}

/** The places of a question and its answer. */
function show(node) {
  const asked = element("div", "asked");
  drawAsked(asked, node);
  const thoughts = element("div", "thoughts");
  const thinking = fold(["Thinking…"], thoughts);
  const text = element("div", "text");
  const calls = element("div", "calls");
  const wrong = element("div", "wrong");
  const stats = element("span", "stats");
  const actions = element("span", "actions");
  const box = element("div", "answer", thinking, text, calls, wrong, element("div", "foot", stats, actions));
  let drawn = 0;
  const draw = () => following(() => {
    cancelAnimationFrame(drawn);
    drawn = 0;
    const run = runs.get(chat);
    const live = run?.node === node;
    box.classList.toggle("live", live);
    box.setAttribute("aria-busy", String(live));
    if (live) delete box.dataset.end;
    else box.dataset.end = node.end || "no end was sent";
    thinking.hidden = !node.thoughts;
    thinking.firstChild.textContent = live && !node.text && !node.calls.length ? "Thinking…" : "Thoughts";
    drawMarkdown(thoughts, node.thoughts);
    drawMarkdown(text, node.text);
    drawCalls(calls, node, live);
    wrong.hidden = !node.problem;
    wrong.textContent = node.problem;
    stats.textContent = live ? figures(run).join(" · ") : node.stats;
    actions.replaceChildren(...(live ? [] : [...turner(node), ...afterwards(node)]));
  });
  // Once a frame is enough; what comes in between is drawn with it.
  const soon = () => { drawn ||= requestAnimationFrame(draw); };
  return { asked, box, draw, soon };
}

/** What can be done with an answer that has ended. */
function afterwards(node) {
  const again = button("quiet again", "Try again", () => retry(node));
  return node.text ? [button("quiet copy", "Copy", (b) => copyText(node.text, b)), again] : [again];
}

/** Steps through the branches that begin with a node, if there are several. */
function turner(node) {
  const all = branches(chat, node);
  const here = all.indexOf(node);
  if (all.length < 2) return [];
  const step = (label, name, by) => {
    const made = button("quiet", label, () => { follow(chat, all[here + by]); remember(chat); redraw(false); });
    made.setAttribute("aria-label", name);
    made.disabled = !all[here + by];
    return made;
  };
  return [element("span", "turn", step("‹", "The version before", -1), `${here + 1}/${all.length}`, step("›", "The next version", 1))];
}

/** What was asked: a message, which can be edited, or results of tools. */
function drawAsked(asked, node) {
  const [{ role, content }] = node.asked;
  if (role === "tool") {
    const calls = chat.nodes[node.up]?.calls ?? [];
    const name = (id) => calls.find((call) => call.id === id)?.function.name ?? "a tool";
    asked.replaceChildren(...node.asked.map((m) => fold(["Result of ", element("code", "", name(m.tool_call_id))], element("pre", "", m.content))));
    return;
  }
  const message = element("div", "said", content);
  message.dir = "auto";
  const edit = button("quiet edit", "Edit", () => {
    const area = element("textarea", "", content);
    area.setAttribute("aria-label", "The message, edited");
    const cancel = () => drawAsked(asked, node);
    const form = fields([area], () => area.value.trim() && go(node.up, [{ role, content: area.value }]), cancel);
    asked.replaceChildren(form);
    area.focus();
    area.setSelectionRange(content.length, content.length);
  });
  asked.replaceChildren(message, element("div", "foot", edit, button("quiet", "Copy", (b) => copyText(content, b))));
}

/** A form of text fields. Enter sends it, as it does a message; Escape leaves it. */
function fields(parts, send, cancel) {
  const buttons = element("div", "row", element("button", "main", "Send"));
  if (cancel) buttons.prepend(button("", "Cancel", cancel));
  const form = element("form", "field", ...parts, buttons);
  form.onsubmit = (e) => { e.preventDefault(); send(); };
  form.onkeydown = (e) => {
    if (e.target.tagName === "TEXTAREA" && sends(e)) { e.preventDefault(); send(); }
    if (e.key === "Escape" && cancel) { e.stopPropagation(); cancel(); }
  };
  return form;
}

/** The calls of an answer, folded. While they are the last word, their results are asked for. */
function drawCalls(into, node, live) {
  node.calls.forEach(({ function: { name, arguments: text } }, i) => {
    const made = into.children[i] ?? into.appendChild(fold(["Calls ", element("code")], element("pre")));
    made.querySelector("code").textContent = name;
    made.querySelector("pre").textContent = indented(text);
  });
  while (into.children.length > node.calls.length) into.lastChild.remove();
  if (live || !node.calls.length || node !== chat.nodes[chat.at]) return;
  const areas = node.calls.map(() => element("textarea"));
  const labels = node.calls.map((call, i) => element("label", "", `Result of ${call.function.name}`, areas[i]));
  const results = () => node.calls.map(({ id }, i) => ({ role: "tool", tool_call_id: id, content: areas[i].value }));
  const form = fields(labels, () => go(chat.nodes.indexOf(node), results()));
  form.classList.add("results");
  into.append(form);
}

function indented(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}

function busy() {
  $("send").hidden = runs.has(chat);
  $("stop").hidden = !runs.has(chat);
}

function problem(message) {
  $("problem").hidden = !message;
  $("problem").textContent = message ?? "";
}

/* ---- Panels ---- */

function panel(id, button, isOpen) {
  $(id).hidden = !isOpen;
  $(button).setAttribute("aria-expanded", String(isOpen));
}

function settings(isOpen) {
  panel("settings", "toggle", isOpen);
  if (isOpen && narrow.matches) list(false);
}

function list(isOpen) {
  panel("chats", "list", isOpen);
  if (isOpen) drawList();
  if (isOpen && narrow.matches) settings(false);
}

function drawList() {
  if ($("chats").hidden) return;
  const all = keptChats();
  $("forget").hidden = !all.length;
  $("kept").replaceChildren(...all.map(({ id, title }) => {
    const link = element("a", "", title);
    link.href = "#" + id;
    const drop = sure("quiet", "Delete", () => remove([id]));
    const item = element("li", "", link, drop);
    if (id === chat.id) item.setAttribute("aria-current", "page");
    return item;
  }));
}

/** A button that asks once more. */
function sure(className, label, action) {
  return button(className, label, (made) => {
    if (made.dataset.asked) return action();
    made.dataset.asked = "yes";
    made.textContent = "Sure?";
    setTimeout(() => { delete made.dataset.asked; made.textContent = label; }, 3000);
  });
}

function wantKey() {
  $("key-label").hidden = false;
  settings(true);
  $("key").focus();
}

/* ---- Acting ---- */

/** Asks something after the node `up`. */
function go(up, asked) {
  const bad = FIELDS.find((name) => !$(name).checkValidity());
  if (bad) { settings(true); $(bad).reportValidity(); return false; }
  problem(null);
  open.set(chat.id, chat);
  if (location.hash !== "#" + chat.id) history.replaceState(null, "", "#" + chat.id);
  answer(chat, extend(chat, up, asked));
  return true;
}

function retry(node) {
  if (node.text || node.thoughts || node.calls.length) return go(node.up, node.asked);
  // What got no answer needs no branch.
  chat.at = chat.nodes.indexOf(node);
  return answer(chat, node);
}

function send() {
  const content = $("prompt").value;
  if (runs.has(chat) || !content.trim()) return;
  if (!go(chat.at, [{ role: "user", content }])) return;
  $("prompt").value = "";
  grow();
}

/** Shows the conversation that the address names, or a new one. */
function visit() {
  const id = location.hash.slice(1);
  if (chat && !runs.has(chat)) open.delete(chat.id);
  chat = open.get(id) ?? (id ? recall(id) : null);
  if (!chat && id) history.replaceState(null, "", location.pathname);
  chat ??= newChat();
  open.set(chat.id, chat);
  problem(null);
  redraw(true);
  drawList();
  if (narrow.matches) list(false);
  $("prompt").focus();
}

function fresh() {
  if (location.hash) history.pushState(null, "", location.pathname);
  visit();
}

/** Deletes conversations, and stops their answers. */
function remove(ids) {
  for (const id of ids) {
    if (open.has(id)) stop(open.get(id));
    open.delete(id);
    forget(id);
  }
  if (ids.includes(chat.id)) { history.replaceState(null, "", location.pathname); visit(); }
  drawList();
}

/** The field is as high as its text, also where the browser does not do that by itself. */
function grow() {
  const p = $("prompt");
  p.style.height = "auto";
  p.style.height = p.scrollHeight + "px";
}

/** Whether a key sends a message. An input method's Enter picks a word. */
const sends = (e) => e.key === "Enter" && !e.shiftKey && !e.isComposing;

async function models() {
  try {
    const { data } = await (await ask("/v1/models")).json();
    $("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
    const before = kept.get("model");
    if (data.some(({ id }) => id === before)) $("model").value = before;
    problem(null);
  } catch (error) { problem(said(error)); }
}

$("composer").onsubmit = (e) => { e.preventDefault(); send(); };
$("prompt").oninput = grow;
$("prompt").onkeydown = (e) => { if (sends(e)) { e.preventDefault(); send(); } };
document.onkeydown = (e) => { if (e.key === "Escape") stop(chat); };
$("stop").onclick = () => { stop(chat); $("prompt").focus(); };
$("new").onclick = fresh;
$("list").onclick = () => list($("chats").hidden);
$("toggle").onclick = () => settings($("settings").hidden);
$("forget").replaceWith(Object.assign(sure("", "Delete all", () => remove(keptChats().map(({ id }) => id))), { id: "forget" }));
$("model").onchange = () => kept.set("model", $("model").value);
$("key").onchange = () => { kept.set("key", $("key").value.trim()); models(); };
$("tools").oninput = () => $("tools").setCustomValidity(tools() ? "" : "A JSON list of tools is wanted, such as []");
for (const name of FIELDS) {
  $(name).value = kept.get(name);
  $(name).onchange = () => kept.set(name, $(name).value);
}
$("tools").oninput();
$("key").value = kept.get("key");
if (kept.get("key")) $("key-label").hidden = false;
window.onhashchange = visit;
window.onstorage = drawList;
window.onpagehide = () => [...runs.keys()].forEach((chat) => { keep(chat); stop(chat); });
visit();
models();
