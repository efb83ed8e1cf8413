// The page: a form, and the images generated from it.

import { compared, element, rows } from "./figures.js";
import { fitted } from "./mask.js";
import { Picture } from "./picture.js";
import { apiKey, keepApiKey, models } from "./server.js";

const PARAMETERS = { sjd: "window=7", rows: "window=6", eagle: "tree=chain-4", lantern: "delta=0.1", "lantern++": "lambda=2" };
const NUMBERS = ["class_id", "seed", "cfg_scale", "temperature", "top_k"];
const at = (id) => document.getElementById(id);
const form = at("form"), method = at("method"), other = at("other");
let known = [], pictures = [], running = null, dirty = false;

function show(element, shown) {
  element.hidden = !shown;
  for (const field of element.querySelectorAll("input, select, textarea")) field.disabled = !shown;
}

const option = (value, text = value) => element("option", text, { value });

async function load() {
  try {
    known = await models();
  } catch (error) {
    return fail(error);
  }
  if (!known.length) return setTimeout(load, 1000);  // the server is loading its models
  at("model").replaceChildren(...known.map(({ id }) => option(id)));
  show(at("model-field"), known.length > 1);
  form.hidden = false;
  at("key-form").hidden = true;
  useModel();
}

const model = () => {
  const { id, lantern } = known[at("model").selectedIndex];
  return { id, ...lantern };
};

function useModel() {
  const { id, size, sizes = [size], rows, columns, takes, classes, methods, qualities, sampling, examples, edits } = model();
  at("about").textContent = `${id}, ${size.replace("x", " x ")} pixels, ${rows} x ${columns} tokens`;
  at("size").replaceChildren(...sizes.map((name) => option(name)));
  at("size").value = size;
  show(at("size-field"), sizes.length > 1);
  show(at("class-field"), takes === "class");
  show(at("prompt-field"), takes !== "class");
  show(at("negative-field"), takes !== "class");
  at("class-id").max = (classes ?? 1) - 1;
  at("class-id").value ||= 0;
  const shortest = [...examples ?? []].sort((a, b) => a.length - b.length).slice(0, 4);
  at("prompt").value ||= shortest[0] ?? "";
  at("examples").replaceChildren(...shortest.map((text) => {
    const chip = element("button", text, { type: "button" });
    chip.addEventListener("click", () => { at("prompt").value = text; });
    return chip;
  }));
  const explained = { strict: "strict: exact", ar: "ar: plain decoding", rows: "rows: several rows per step" };
  const ordered = [...qualities, ...methods];
  method.replaceChildren(...ordered.map((name) => option(name, explained[name])));
  other.replaceChildren(option("", "nothing"), ...ordered.map((name) => option(name, explained[name])));
  for (const [name, value] of Object.entries(sampling)) {
    if (form.elements[name]) form.elements[name].placeholder = value;
  }
  show(at("open-field"), edits);
  at("draw").disabled = takes === "embeddings";
  report(takes === "embeddings" ? "This page cannot send text embeddings, which this model needs." : "Ready");
  useMethods();
}

function useMethods() {
  for (const select of [method, other]) {
    const parameters = at(`${select.id}-parameters`);
    parameters.hidden = !(select.value in PARAMETERS);
    parameters.placeholder = PARAMETERS[select.value] ?? "";
  }
  at("fair").hidden = !other.value;
}

/** Build the request for one method from the fields that are filled in. */
function request(select) {
  const body = {}, parameters = at(`${select.id}-parameters`);
  for (const [name, value] of new FormData(form)) {
    if (value !== "") body[name] = NUMBERS.includes(name) ? Number(value) : value;
  }
  const chosen = [select.value, ...(parameters.hidden || !parameters.value ? [] : [parameters.value.trim()])].join(":");
  body[model().qualities.includes(chosen) ? "quality_budget" : "method"] = chosen;
  return body;
}

const ready = () => !running && !at("draw").disabled && form.reportValidity();

/** Generate images from the form. files: image and mask of an edit, null without one. */
async function start(files = null) {
  if (!ready()) return;
  running = new AbortController();
  const live = !other.value;
  place([method, ...(other.value ? [other] : [])].map((select) =>
    new Picture(request(select), model(), { live, changed, redraw, files })));
  busy(true);
  try {
    for (const picture of pictures) {
      report(`Generating with ${picture.label}`);
      await picture.draw(running.signal);
    }
    report(pictures.length > 1 ? compared(...pictures) : `Done in ${pictures[0].figures.seconds.toFixed(2)} s`);
  } catch (error) {
    if (running.signal.aborted) report("Cancelled");
    else fail(error);
  }
  running = null;
  busy(false);
  changed();
}

/** Replace the images on the page. */
function place(shown) {
  pictures = shown;
  at("error").hidden = true;
  at("panels").replaceChildren(...pictures.map((picture) => picture.element));
  at("output").hidden = at("overlay-field").hidden = false;
  at("empty").hidden = true;
}

async function redraw(picture) {
  if (picture.mask.empty) return report("Paint over a part of the image first");
  if (ready()) start({ image: picture.file, mask: await picture.mask.file() });
}

/** Open an image file for editing. */
async function open(file) {
  if (!file || running) return;
  const { size } = model(), [width, height] = (request(method).size ?? size).split("x").map(Number);
  try {
    const picture = new Picture({ ...request(method), method: file.name }, model(), { live: true, changed, redraw });
    picture.open(await fitted(file, width, height));
    place([picture]);
    changed();
    report("Paint over the part to regenerate");
  } catch {
    fail(new Error(`This browser cannot read ${file.name} as an image.`));
  }
}

function busy(yes) {
  at("cancel").hidden = !yes;
  at("draw").setAttribute("aria-disabled", yes);  // not `disabled`, which would lose the focus
  if (yes) at("output").scrollIntoView({ block: "nearest" });
}

/** Update the page, at most once per frame. */
function changed() {
  if (dirty) return;
  dirty = true;
  requestAnimationFrame(() => {
    dirty = false;
    for (const picture of pictures) picture.show();
    at("figures").replaceChildren(...rows(pictures));
    at("figures").hidden = !pictures.some(({ kinds }) => kinds);
  });
}

function report(text) {
  at("status").textContent = text;
}

function fail(error) {
  at("error").textContent = error.message;
  at("error").hidden = false;
  report("Failed");
  if (!pictures.some(({ kinds }) => kinds)) at("output").hidden = at("overlay-field").hidden = true;
  if (error.status === 401) {
    at("key-form").hidden = false;
    at("key").focus();
  }
}

form.addEventListener("submit", (event) => { event.preventDefault(); start(); });
form.addEventListener("change", useMethods);
at("open").addEventListener("change", ({ target }) => { open(target.files[0]); target.value = ""; });
at("model").addEventListener("change", useModel);
at("dice").addEventListener("click", () => { at("seed").value = Math.floor(Math.random() * 1e6); });
at("cancel").addEventListener("click", () => running?.abort());
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    start();
  }
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepApiKey(at("key").value);
  at("error").hidden = true;
  load();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
at("key").value = apiKey();
load();
