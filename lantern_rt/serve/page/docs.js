// Description of the API, generated from /openapi.json, with an example request that can be sent.

import { ask, models } from "./server.js";

const { paths, components } = await (await fetch("openapi.json")).json();

/** Create an element with text or other elements in it. */
function element(kind, ...within) {
  const made = document.createElement(kind);
  made.append(...within);
  return made;
}

/** Describe a schema in words. */
function words(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.filter(({ type }) => type !== "null").map(words).join(" or ");
  if (schema.enum) return schema.enum.join(", ");
  const bounds = [schema.minimum, schema.maximum].filter((bound) => bound !== undefined).join(" to ");
  return [schema.type, bounds].filter(Boolean).join(", ");
}

for (const [path, methods] of Object.entries(paths)) {
  for (const [method, { summary }] of Object.entries(methods)) {
    document.getElementById("paths").append(element("h2", `${method.toUpperCase()} ${path}`), element("p", summary));
  }
}
for (const [name, { properties = {} }] of Object.entries(components.schemas)) {
  const fields = Object.entries(properties).map(([field, schema]) => [element("dt", element("code", field)), element("dd", words(schema))]);
  document.getElementById("paths").append(element("h2", name), element("dl", ...fields.flat()));
}

const body = document.getElementById("body"), answer = document.getElementById("answer");
const image = document.getElementById("image");

/** Send the example, and show the answer with its image. */
async function send(event) {
  event.preventDefault();
  answer.textContent = "Generating";
  try {
    const { data, ...rest } = await (await ask("v1/images/generations", { method: "POST", body: body.value })).json();
    Object.assign(image, { src: `data:image/${rest.output_format};base64,${data[0].b64_json}`, hidden: false });
    answer.textContent = JSON.stringify({ data: [{ b64_json: `${data[0].b64_json.slice(0, 12)}...` }], ...rest });
  } catch ({ message }) {
    answer.textContent = message;
  }
}

document.querySelector("form").addEventListener("submit", send);
try {
  const [{ id, lantern: { takes, examples = [] } }] = await models();
  const subject = takes === "class" ? { class_id: 0 } : { prompt: examples[0] ?? "" };
  body.value = JSON.stringify({ model: id, ...subject, seed: 1 });
} catch ({ message }) {
  answer.textContent = message;  // such as a missing API key
}
