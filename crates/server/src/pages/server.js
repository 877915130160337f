"use strict";
/* Talking to the server. */

class Refusal extends Error {
  constructor(status, message, after) { super(message); Object.assign(this, { status, after }); }
}

/** `fetch` with the key; an answer that is not 2xx becomes a `Refusal` with the server's message. */
async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const key = kept.get("key");
  if (key) headers.authorization = "Bearer " + key;
  // The origin: a page opened as http://me:key@host may not fetch by paths.
  const response = await fetch(location.origin + path, { ...options, headers });
  if (response.ok) return response;
  const text = await response.text();
  let message = text || response.statusText;
  try { message = JSON.parse(text).error.message; } catch { /* not ours */ }
  if (response.status === 401) wantKey();
  throw new Refusal(response.status, message, response.headers.get("retry-after"));
}

/** The chunks of a streamed answer to `body`. */
async function* chunks(body, signal) {
  const headers = { "content-type": "application/json" };
  const response = await ask("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(0, chunk.error.message ?? "the server failed");
    yield chunk;
  }
}

/** The `data:` of each server-sent event. Comments are skipped; a frame may come in many pieces. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value.replaceAll("\r", "");
    const frames = rest.split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const data = frame.split("\n").filter((l) => l.startsWith("data:")).map((l) => l.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}

/** What an error says to a person. */
function said(error) {
  if (!(error instanceof Refusal)) return "The server cannot be reached, or the connection broke: " + error.message;
  if (error.status === 401) return "The server asks for an API key (see Settings): " + error.message;
  return error.message + (error.after ? `\nTry again in ${error.after} s.` : "");
}
