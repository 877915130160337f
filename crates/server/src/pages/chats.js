"use strict";
/* Conversations, and what of them the browser keeps.

   A conversation is a tree: whoever edits a message or tries again gets another branch, and none is lost. A node is
   what was asked (messages of a user, or results of tools) and the answer to that; `up` is the node before it. What is
   seen is the path that ends at `at`. */

/* What the page remembers; it also works where storage is refused. */
const kept = {
  get: (name) => { try { return localStorage.getItem("infernum." + name) ?? ""; } catch { return ""; } },
  set: (name, value) => { try { localStorage.setItem("infernum." + name, value); return true; } catch { return false; } },
  drop: (name) => { try { localStorage.removeItem("infernum." + name); } catch { /* nothing is there */ } },
  names: () => { try { return Object.keys(localStorage).filter((n) => n.startsWith("infernum.")).map((n) => n.slice(9)); } catch { return []; } },
};

/** At most so many conversations are kept, and so many characters of them: browsers allow 5 MiB, of two bytes each. */
const MOST = { chats: 200, characters: 2_000_000 };

const newChat = () => ({ id: Date.now().toString(36) + Math.random().toString(36).slice(2, 8), nodes: [], at: -1 });

/** The nodes from the first question to the end of what is seen. */
function path(chat, at = chat.at) {
  const nodes = [];
  for (let i = at; i >= 0; i = chat.nodes[i].up) nodes.unshift(chat.nodes[i]);
  return nodes;
}

/** The branches that begin where a node does, itself among them. */
const branches = (chat, node) => chat.nodes.filter((n) => n.up === node.up);

/** Adds a question after the node `up`, and goes there. */
function extend(chat, up, asked) {
  const node = { up, asked, text: "", thoughts: "", calls: [] };
  chat.at = chat.nodes.push(node) - 1;
  return node;
}

/** Goes to the branch of a node, as far as its newest end. */
function follow(chat, node) {
  chat.at = chat.nodes.indexOf(node);
  for (let i = chat.at + 1; i < chat.nodes.length; i += 1) if (chat.nodes[i].up === chat.at) chat.at = i;
}

/** What the model is told before and with `node`. What got no answer is left out, unless it is asked now. */
function messages(chat, node, system) {
  const list = system ? [{ role: "system", content: system }] : [];
  for (const before of path(chat, chat.nodes.indexOf(node))) {
    const { asked, text, thoughts, calls } = before;
    if (before === node) list.push(...asked);
    else if (calls.length) {
      // Models that think before they call want to see why they did.
      const why = thoughts ? { reasoning_content: thoughts } : {};
      list.push(...asked, { role: "assistant", content: text, ...why, tool_calls: calls });
    } else if (text) list.push(...asked, { role: "assistant", content: text });
  }
  return list;
}

/** A line that says which conversation it is. */
function title(chat) {
  const words = (chat.nodes[0]?.asked[0].content ?? "").trim().replace(/\s+/g, " ");
  return words.length > 60 ? words.slice(0, 59) + "…" : words || "New chat";
}

/* ---- Keeping ---- */

/* What is stored of one: when it was last changed and its title, a line each, so that the list needs no more; JSON. */
const stored = (id) => kept.get("chat." + id);

/** Conversations that are kept, the newest first. */
function keptChats() {
  const ids = kept.names().filter((name) => name.startsWith("chat.")).map((name) => name.slice(5));
  const chats = ids.map((id) => {
    const text = stored(id);
    const [time, title] = text.split("\n", 2);
    return { id, time: Number(time), title, size: text.length };
  });
  return chats.sort((a, b) => b.time - a.time);
}

/** Keeps a conversation; the oldest make room. Whether there was room. */
function keep(chat) {
  const text = [Date.now(), title(chat), JSON.stringify(chat)].join("\n");
  const others = keptChats().filter(({ id }) => id !== chat.id);
  let characters = others.reduce((sum, { size }) => sum + size, text.length);
  while (text.length <= MOST.characters) {
    const fits = others.length < MOST.chats && characters <= MOST.characters;
    if (fits && kept.set("chat." + chat.id, text)) return true;
    const oldest = others.pop();
    if (!oldest) return false;
    characters -= oldest.size;
    kept.drop("chat." + oldest.id);
  }
  return false;
}

/** A conversation that is kept; none where what is stored is damaged. */
function recall(id) {
  const text = stored(id);
  try {
    const chat = JSON.parse(text.slice(text.indexOf("\n", text.indexOf("\n") + 1) + 1));
    const whole = chat.nodes.every((n, i) => n.up < i && Array.isArray(n.asked) && Array.isArray(n.calls));
    return whole && chat.id === id && chat.at < chat.nodes.length ? chat : null;
  } catch { return null; }
}

const forget = (id) => kept.drop("chat." + id);
