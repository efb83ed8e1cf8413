// The page: a form, and the images generated from it.

import { compared, element, rows } from "./figures.js";
import { Codes } from "./codes.js";
import { History } from "./history.js";
import { fitted } from "./mask.js";
import { Picture } from "./picture.js";
import { apiKey, keepApiKey, models } from "./server.js";

const FORM = "lantern-rt-form";
const NUMBERS = ["class_id", "seed", "cfg_scale", "temperature", "top_k", "top_p"];
const at = (id) => document.getElementById(id);
const form = at("form"), method = at("method"), other = at("other");
const callbacks = { changed, redraw, keepSeed, enlarge };
const history = new History(at("history"), view);
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
    return error.status === 401 && !apiKey() ? askForKey("This server requires an API key") : fail(error);
  }
  if (!known.length) return setTimeout(load, 1000);  // the server is loading its models
  at("model").replaceChildren(...known.map(({ id }) => option(id)));
  show(at("model-field"), known.length > 1);
  form.hidden = false;
  at("key-form").hidden = true;
  useModel();
  restore();
  useMethods();
}

const fields = () => [...form.querySelectorAll("input:not([type=file]), select, textarea")];

/** Keep the form of this tab for a reload. */
function keep() {
  const entries = fields().map(({ id, type, value, checked }) => [id, type === "checkbox" ? checked : value]);
  sessionStorage.setItem(FORM, JSON.stringify(Object.fromEntries(entries)));
}

/** Fill the form as `keep` left it. */
function restore() {
  const kept = JSON.parse(sessionStorage.getItem(FORM) ?? "{}");
  if (kept.model && known.some(({ id }) => id === kept.model)) {
    at("model").value = kept.model;
    useModel();
  }
  for (const field of fields()) {
    const value = kept[field.id] ?? null, chosen = field.value;
    if (value === null) continue;
    if (field.type === "checkbox") field.checked = value;
    else field.value = value;
    if (field.tagName === "SELECT" && !field.value) field.value = chosen;  // the server offers it no longer
  }
}

const kind = () => (model().images === false ? Codes : Picture);

const model = () => {
  const { id, lantern } = known[at("model").selectedIndex];
  return { id, ...lantern };
};

function useModel() {
  const { id, size, sizes = [size], rows, columns, takes, classes, max_n } = model();
  const { methods, qualities, sampling, examples, words = [], edits, images = true } = model();
  const unit = images ? "pixels" : "pixels, made by another program";
  at("about").textContent = `${id}, ${size.replace("x", " x ")} ${unit}, ${rows} x ${columns} tokens`;
  at("size").replaceChildren(...sizes.map((name) => option(name)));
  at("size").value = size;
  show(at("size-field"), sizes.length > 1);
  show(at("class-field"), takes === "class");
  show(at("prompt-field"), takes !== "class");
  show(at("negative-field"), takes !== "class");
  at("class-id").max = (classes ?? 1) - 1;
  at("class-id").value ||= 0;
  const shortest = [...examples ?? []].sort((a, b) => a.length - b.length).slice(0, 4);
  const scenes = [...examples ?? []].filter((text) => text.length < 70).sort((a, b) => b.length - a.length);
  at("prompt").value ||= scenes[0] ?? shortest[0] ?? "";  // a long caption leaves little open, so its image is cleaner
  at("examples").replaceChildren(...shortest.map((text) => chip(text)));
  at("words").hidden = !words.length;
  at("words").querySelector("p").textContent = words.join(", ");
  const explained = { strict: "strict: exact", ar: "ar: exact, one token per step",
    rows: "rows: several rows per step" };
  const ordered = [...qualities, ...methods];
  method.replaceChildren(...ordered.map((name) => option(name, explained[name])));
  other.replaceChildren(option("", "nothing"), ...ordered.map((name) => option(name, explained[name])));
  for (const [name, value] of Object.entries(sampling)) {
    if (form.elements[name]) form.elements[name].placeholder = value;
  }
  show(at("open-field"), edits);
  at("count").max = max_n;
  show(at("count-field"), max_n > 1);
  at("draw").disabled = takes === "embeddings";
  report(takes === "embeddings" ? "This page cannot send text embeddings, which this model needs." : "Ready");
  useMethods();
}

/** Create a button that writes a prompt into the form. */
function chip(text, then = () => {}) {
  const made = element("button", text, { type: "button" });
  made.addEventListener("click", () => { at("prompt").value = text; then(); });
  return made;
}

function useMethods() {
  for (const select of [method, other]) {
    const parameters = at(`${select.id}-parameters`);
    parameters.placeholder = model().parameters?.[select.value] ?? "";
    parameters.hidden = !parameters.placeholder;
  }
  at("fair").hidden = !other.value;
  at("count").disabled = Boolean(other.value);
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
  if (at("random").checked || !at("seed").value) at("seed").value = Math.floor(Math.random() * 1e6);
  const made = other.value ?
    [method, other].map((select) => new (kind())(request(select), model(), callbacks, { files })) :
    several(Number(at("count").value), files);
  place(made);
  running = new AbortController();
  const { signal } = running;
  busy(true);
  try {
    report(other.value ? await compare(made, signal) : await generate(made, signal));
  } catch (error) {
    if (signal.aborted) report("Cancelled");
    else fail(error);
  }
  running = null;
  busy(false);
  discard([...made, ...history.add(made.filter(({ png }) => png))]);
  history.mark(pictures);
  changed();
}

/** Prepare images whose seeds follow each other, as those of a request with `n`. */
function several(count, files) {
  const body = request(method), { rows } = model(), partial = Math.ceil(Math.min(rows - 1, 64) / count);
  return Array.from({ length: count }, (_, i) => {
    const seed = body.seed + i, label = count > 1 ? `Seed ${seed}` : undefined;
    return new (kind())({ ...body, seed }, model(), callbacks, { label, partial, files });
  });
}

/** Generate images at once, each as a stream of its own, because a stream has one image. */
async function generate(made, signal) {
  const { body } = made[0], began = performance.now();
  report(`Generating ${made.length > 1 ? `${made.length} images ` : ""}with ${body.method ?? body.quality_budget}`);
  const ends = await Promise.allSettled(made.map((picture) => picture.draw(signal)));
  const failed = ends.find(({ reason }) => reason);
  if (failed) throw failed.reason;
  if (made.length === 1) return `Done in ${made[0].figures.seconds.toFixed(2)} s`;
  return `${made.length} images in ${((performance.now() - began) / 1000).toFixed(2)} s`;
}

/** Generate one image after the other, and compare their times. */
async function compare(made, signal) {
  at("statistics").open = true;
  for (const picture of made) {
    report(`Generating with ${picture.label}`);
    await picture.draw(signal);
  }
  return compared(...made);
}

/** Replace the images on the page. */
function place(shown) {
  const before = pictures;
  pictures = shown;
  if (!running) discard(before);
  history.mark(pictures);
  at("error").hidden = at("suggestions").hidden = true;
  at("panels").classList.toggle("many", pictures.length > 2);
  at("panels").replaceChildren(...pictures.map((picture) => picture.element));
  at("output").hidden = at("overlay-field").hidden = false;
  at("empty").hidden = true;
  changed();
}

/** Free images that are neither shown nor in the history. */
function discard(candidates) {
  for (const one of candidates) if (!pictures.includes(one) && !history.pictures.includes(one)) one.release();
}

/** Show a finished image alone. */
function view(picture) {
  place([picture]);
  reveal();
  if (!running) report(picture.description);
}

function enlarge(picture) {
  if (pictures.length > 2 && picture.png) view(picture);
}

function keepSeed({ body }) {
  at("seed").value = body.seed;
  at("random").checked = false;
  report(`Seed ${body.seed} is used from now on`);
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
    const picture = new Picture({ ...request(method), method: file.name }, model(), callbacks);
    picture.open(await fitted(file, width, height));
    place([picture]);
    report("Paint over the part to regenerate");
  } catch {
    fail(new Error(`This browser cannot read ${file.name} as an image.`));
  }
}

function busy(yes) {
  at("cancel").hidden = !yes;
  at("draw").setAttribute("aria-disabled", yes);  // not `disabled`, which would lose the focus
  if (yes) reveal();
}

/** Scroll to the results if they are out of sight, as on a phone, where they stand below the form. */
function reveal() {
  const { top } = at("results").getBoundingClientRect();
  if (top < 0 || top > innerHeight / 3) at("results").scrollIntoView();
}

/** Update the page, at most once per frame. */
function changed() {
  if (dirty) return;
  dirty = true;
  requestAnimationFrame(() => {
    dirty = false;
    for (const picture of pictures) picture.show();
    at("figures").replaceChildren(...rows(pictures));
    at("statistics").hidden = !pictures.some(({ kinds }) => kinds);
  });
}

function report(text) {
  at("status").textContent = text;
}

function fail(error) {
  const { message, suggestions = [] } = error;
  const parts = message.split("; ");
  at("error").textContent = suggestions.length ? parts[0] : message;
  at("error").hidden = false;
  at("suggestions").querySelector(".chips").replaceChildren(...suggestions.map((text) => chip(text, start)));
  at("any-words").textContent = parts.find((part) => part.startsWith("any words: ")) ?? "";
  at("suggestions").hidden = !suggestions.length;
  report("Failed");
  if (!pictures.some(({ kinds }) => kinds)) at("output").hidden = at("overlay-field").hidden = true;
  if (error.status === 401) askForKey("Failed");
}

function askForKey(status) {
  report(status);
  at("key-form").hidden = false;
  at("key").focus();
}

form.addEventListener("submit", (event) => { event.preventDefault(); start(); });
form.addEventListener("change", useMethods);
addEventListener("pagehide", keep);
at("open").addEventListener("change", ({ target }) => { open(target.files[0]); target.value = ""; });
at("model").addEventListener("change", useModel);
at("seed").addEventListener("input", () => { at("random").checked = false; });
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
