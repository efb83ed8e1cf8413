// Description of the API, generated from /openapi.json.

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
