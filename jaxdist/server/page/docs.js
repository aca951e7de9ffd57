// The API's description, from what the server says of itself; nothing is loaded from elsewhere.

import { startTheme } from "./theme.js";

function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

// A schema's type in a few words.
function words(schema, shapes, depth = 0) {
  if (!schema || depth > 4) return "any";
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) {
    const kinds = schema.anyOf.filter((kind) => kind.type !== "null");
    return [...new Set(kinds.map((kind) => words(kind, shapes, depth + 1)))].join(" or ");
  }
  if (schema.enum || schema.const !== undefined) return [schema.const ?? schema.enum].flat().map((v) => JSON.stringify(v)).join(", ");
  if (schema.type === "array") return `list of ${words(schema.items, shapes, depth + 1)}`;
  const bounds = [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"], ["exclusiveMaximum", "<"]]
    .filter(([key]) => schema[key] !== undefined && Math.abs(schema[key]) < 2 ** 31)
    .map(([key, sign]) => `${sign} ${schema[key]}`);
  return [schema.type ?? "any", ...bounds].join(" ");
}

function fields(name, shapes) {
  const shape = shapes[name];
  const rows = Object.entries(shape.properties ?? {}).map(([field, schema]) => {
    const needed = shape.required?.includes(field);
    return make("tr", "", make("td", "", make("code", "", field), needed ? make("span", "needed", " required") : ""), make("td", "", words(schema, shapes)));
  });
  return make("table", "", make("tbody", "", ...rows));
}

// Shapes that a shape speaks of, each once, in the order in which they come.
function mentioned(name, shapes, found = new Set()) {
  if (found.has(name) || !shapes[name]) return found;
  found.add(name);
  for (const [, other] of JSON.stringify(shapes[name]).matchAll(/"#\/components\/schemas\/(\w+)"/g)) mentioned(other, shapes, found);
  return found;
}

function shapesOf(title, root, shapes) {
  const parts = [...mentioned(root, shapes)].map((name) => make("div", "", make("h5", "", name), make("div", "table", fields(name, shapes))));
  return make("details", "", make("summary", "", title), ...parts);
}

function route(path, method, about, shapes) {
  const node = make("section", "route", make("h3", "", make("span", `method ${method}`, method.toUpperCase()), make("code", "", path)));
  if (about.description) node.append(make("p", "", about.description));
  const request = about.requestBody?.content["application/json"].schema.$ref;
  const answer = about.responses?.["200"]?.content?.["application/json"]?.schema?.$ref;
  if (request) node.append(shapesOf("Request", request.split("/").at(-1), shapes));
  if (answer) node.append(shapesOf("Answer", answer.split("/").at(-1), shapes));
  return node;
}

startTheme();
const base = new URL("./", location.href).href;
document.getElementById("example").textContent = `curl ${base}v1/chat/completions \\
  -H 'Content-Type: application/json' \\
  -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}'`;
const description = await (await fetch("openapi.json")).json();
for (const [path, methods] of Object.entries(description.paths)) {
  for (const [method, about] of Object.entries(methods)) {
    document.getElementById("routes").append(route(path, method, about, description.components.schemas));
  }
}
