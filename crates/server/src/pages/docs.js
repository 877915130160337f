"use strict";
/* The API, as its OpenAPI document describes it: in its order, with examples that are made of it. */
const $ = (id) => document.getElementById(id);
let api = {};

/* ---- Schemas ---- */

const resolve = (s) => (s?.$ref ? resolve(s.$ref.slice(2).split("/").reduce((o, k) => o[k], api)) : s ?? {});

function typeOf(s) {
  if (s.$ref) { const full = resolve(s); return full.oneOf || full.enum ? typeOf(full) : s.$ref.split("/").pop(); }
  const any = s.oneOf ?? s.anyOf;
  if (any) return any.map(typeOf).filter((t) => t !== "null").join(" | ");
  if (s.enum) return s.enum.map((v) => JSON.stringify(v)).join(" | ");
  const types = [s.type ?? "any"].flat().filter((t) => t !== "null");
  if (types.includes("array")) return typeOf(s.items ?? {}) + "[]";
  const [low, high] = [s.minimum ?? s.exclusiveMinimum, s.maximum];
  const range = low !== undefined && high !== undefined && Math.abs(high) < 1e9 ? `, ${low} to ${high}` : "";
  return types.join(" | ") + range;
}

/** The fields of a schema, with those of its parts: name, schema, and whether it must be there. */
function fields(schema) {
  const s = resolve(schema);
  const own = Object.entries(s.properties ?? {}).map(([name, field]) => [name, field, (s.required ?? []).includes(name)]);
  return [...(s.allOf ?? []).flatMap(fields), ...own];
}

function table(title, schema) {
  const rows = fields(schema).map(([name, field, required]) => element("tr", "",
    element("td", "", element("code", "", name), required ? " *" : ""),
    element("td", "type", typeOf(field)),
    element("td", "", ...inline(field.description ?? resolve(field).description ?? ""))));
  if (!rows.length) return [];
  return [element("details", "", element("summary", "", title), element("div", "wide", element("table", "", ...rows)))];
}

/* ---- Examples ---- */

const PYTHON = {
  openai: ["from openai import OpenAI", "OpenAI", { base_url: () => location.origin + "/v1", api_key: (key) => key }],
  anthropic: ["from anthropic import Anthropic", "Anthropic", { base_url: () => location.origin, api_key: (key) => key }],
  ollama: ["from ollama import Client", "Client", { host: () => location.origin, headers: (key) => (keyed() ? { authorization: key } : null) }],
};

/** Whether the server wants a key. */
const keyed = () => !(api.security ?? [{}]).some((way) => !Object.keys(way).length);
const needsKey = (op) => keyed() && !(op.security ?? []).some((way) => !Object.keys(way).length);

/** What an operation is asked in its example: the address, the model that a path names, and the body. */
function asked(path, op) {
  const [model] = resolve({ $ref: "#/components/schemas/CommonFields" }).properties.model.enum ?? ["MODEL"];
  const values = (op.parameters ?? []).map(({ name }) => (name === "model" ? model : name.toUpperCase()));
  const url = location.origin + (op.parameters ?? []).reduce((at, { name }, i) => at.replace(`{${name}}`, encodeURI(values[i])), path);
  const content = op.requestBody?.content["application/json"];
  if (!content) return { url, values };
  const takesModel = fields(content.schema).some(([name]) => name === "model");
  return { url, values, body: { ...(takesModel ? { model } : {}), ...content.example } };
}

function curl(verb, op, { url, body }) {
  const parts = [`curl ${verb === "get" || body ? "" : `-X ${verb.toUpperCase()} `}${shell(url)}`];
  if (needsKey(op)) parts.push('-H "authorization: Bearer $API_KEY"');
  if (verb === "post") parts.push("-H 'content-type: application/json'");
  if (body) parts.push(`-d ${shell(JSON.stringify(body, null, 2))}`);
  return parts.join(" \\\n  ");
}

/** A word of a shell. */
const shell = (text) => (/^[\w:/.,@-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

function python(verb, op, { url, values, body }) {
  const [sdk, call] = (op["x-python"] ?? "").split(": ");
  const key = (prefix) => (needsKey(op) ? { code: `${prefix}os.environ["API_KEY"]` } : "none");
  const lines = needsKey(op) ? ["import os", ""] : [];
  if (!PYTHON[sdk]) {
    const given = [literal(url, "")];
    if (needsKey(op)) given.push(`headers={"authorization": ${literal(key('"Bearer " + '), "")}}`);
    if (body) given.push(`json=${literal(body, "")}`);
    else if (verb === "post") given.push("json={}");
    return [...lines, "import requests", "", `answer = requests.${verb}(${given.join(", ")})`, "print(answer.text)"].join("\n");
  }
  const [from, made, options] = PYTHON[sdk];
  const client = Object.entries(options).map(([name, value]) => [name, value(key(sdk === "ollama" ? '"Bearer " + ' : ""))]).filter(([, value]) => value !== null);
  const given = [...values.map((value) => literal(value, "")), ...Object.entries(body ?? {}).map(([name, value]) => `${name}=${literal(value, "    ")}`)];
  const inside = given.length > 1 ? `\n    ${given.join(",\n    ")},\n` : given.join("");
  const setUp = client.map(([name, value]) => `${name}=${literal(value, "")}`).join(", ");
  return [...lines, from, "", `client = ${made}(${setUp})`, `answer = client.${call}(${inside})`, "print(answer)"].join("\n");
}

/** A value as Python writes it. */
function literal(value, indent) {
  if (value?.code) return value.code;
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const parts = Array.isArray(value) ? value.map((v) => literal(v, indent)) : Object.entries(value).map(([k, v]) => `${JSON.stringify(k)}: ${literal(v, indent)}`);
  return open + parts.join(", ") + close;
}

/* ---- The page ---- */

function operation(path, verb, op) {
  const heading = element("h3", "", element("span", "verb", verb), element("code", "", path));
  const [summary, ...more] = [op.summary, op.description].filter(Boolean);
  const schema = (content) => content && (content["application/json"] ?? Object.values(content)[0])?.schema;
  const example = asked(path, op);
  const code = [["curl", "curl", curl(verb, op, example)], ["python", "Python", python(verb, op, example)]];
  const figures = code.map(([name, title, text]) => Object.assign(codeFigure(title, text), { className: name }));
  const made = element("section", "", heading, ...[summary, ...more].map((text) => element("p", "", ...inline(text))), ...figures,
    ...table("Request (* required)", schema(op.requestBody?.content)), ...table("Response", schema(op.responses["200"]?.content)));
  made.id = op.operationId;
  return made;
}

function draw() {
  const key = keyed() ? " This server wants a key: the examples take it from the environment's `API_KEY`." : "";
  $("about").replaceChildren(...inline(api.info.description + key));
  const all = Object.entries(api.paths).flatMap(([path, verbs]) => Object.entries(verbs).map(([verb, op]) => [path, verb, op]));
  const topics = Map.groupBy(all, ([, , op]) => op.tags[0]);
  $("contents").replaceChildren(...[...topics].map(([topic, ops]) => element("div", "", element("b", "", topic),
    element("ul", "", ...ops.map(([path, verb, op]) => {
      const link = element("a", "", element("span", "verb", verb), path);
      link.href = "#" + op.operationId;
      return element("li", "", link);
    })))));
  $("routes").replaceChildren(...[...topics].flatMap(([topic, ops]) => [element("h2", "", topic), ...ops.map((op) => operation(...op))]));
  document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

$("languages").onchange = (e) => { document.documentElement.dataset.language = e.target.value; };
// The origin: a page opened as http://me:key@host may not fetch by paths.
fetch(location.origin + "/openapi.json").then((r) => r.json()).then((found) => { api = found; draw(); })
  .catch((e) => { $("routes").textContent = "The description could not be read: " + e; });
