// One image while it is generated: its panel on the page, its map and its statistics.

import { count, describe, paint } from "./map.js";
import { Mask } from "./mask.js";
import { address, apiKey, draw, ServerError } from "./server.js";

export class Picture {
  endpoint = "generations";
  shell = "jq -r '.data[0].b64_json' | base64 -d > picture.png";

  /**
   * body: fields of the request, which the curl command sends too. partial: number of partial images. files: image and
   * mask of an edit. label: name of the image where several are shown. Callbacks: changed after every change, redraw to
   * regenerate a part, keepSeed, and enlarge to show this image alone.
   */
  constructor(body, model, { changed, redraw, keepSeed, enlarge }, { label, partial = 0, files = null } = {}) {
    Object.assign(this, { body, model, partial, changed, files });
    Object.assign(this, { kinds: "", first: 0, passes: 0, figures: null, png: "", url: "" });
    this.label = label ?? body.method ?? body.quality_budget;
    this.subject = body.prompt ?? (body.class_id === undefined ? this.label : `class ${body.class_id}`);
    this.element = document.getElementById("panel").content.cloneNode(true).firstElementChild;
    this.part = (selector) => this.element.querySelector(selector);
    const [width, height] = (body.size ?? model.size).split("x").map(Number);
    this.part(".stage").style.aspectRatio = `${width} / ${height}`;
    this.mask = new Mask(this.part(".mask"), this.part(".brush"), this.part(".cell"), { width, height, ...model });
    this.part(".change").addEventListener("click", () => this.paint(true));
    this.part(".clear").addEventListener("click", () => this.mask.clear());
    this.part(".leave").addEventListener("click", () => { this.paint(false); this.part(".change").focus(); });
    this.part(".redraw").addEventListener("click", () => redraw(this));
    this.part(".keep").addEventListener("click", () => keepSeed(this));
    this.part(".stage").addEventListener("click", () => { if (this.part(".mask").hidden) enlarge(this); });
    this.part(".curl").hidden = Boolean(files);
    if (files) this.showFile(files.image);
    this.part("h2").textContent = this.label;
    this.part(".subject").textContent = this.subject;
    this.part(".curl").addEventListener("click", () => this.copyCommand());
    this.show();
  }

  /** Fields of the request for a stream. */
  get streamed() {
    return { ...this.body, stream: true, steps: true, partial_images: this.partial };
  }

  /** Generate the image. Throws the error that stops it. */
  async draw(signal) {
    this.began = performance.now();
    for await (const event of draw(this.endpoint, this.streamed, this.files, signal)) {
      if (event.type === "lantern.step") this.step(event);
      if (event.type.endsWith(".partial_image")) this.showImage(`data:image/png;base64,${event.b64_json}`);
      if (event.type.endsWith(".completed")) await this.finish(event);
    }
    if (!this.png) throw new ServerError(0, { message: "The connection ended before the image was finished." });
  }

  step({ kinds, done, total, rows, columns, first_codes: first = 0, method }) {
    const before = this.kinds.slice(0, done - kinds.length);  // a new replica may start the image again
    Object.assign(this, { rows, columns, first, total, kinds: before + kinds, passes: before ? this.passes + 1 : 1 });
    const seconds = (performance.now() - this.began) / 1000, drawn = done - count(this.kinds, "k");
    this.figures = { method, target_passes: this.passes, tokens_per_forward_pass: drawn / this.passes, seconds };
    this.changed();
  }

  finish({ b64_json, lantern, output_format = "png" }) {
    Object.assign(this, { figures: lantern, png: b64_json });
    const bytes = Uint8Array.from(atob(b64_json), (one) => one.charCodeAt(0)), save = this.part(".save");
    this.showFile(new Blob([bytes], { type: `image/${output_format}` }));
    save.href = this.url;
    save.download = `${lantern.model}-${lantern.seeds[0]}.${output_format}`;
    save.hidden = false;
    this.part(".change").hidden = !this.model.edits;
    this.changed();
  }

  /** Show an image file for editing. */
  open(file) {
    this.showFile(file);
    this.part(".under").hidden = true;
    this.paint(true);
    this.show();
  }

  showFile(file) {
    this.release();
    Object.assign(this, { file, url: URL.createObjectURL(file) });
    this.showImage(this.url);
  }

  /** Free the memory of the image, which can no longer be shown. */
  release() {
    URL.revokeObjectURL(this.url);
  }

  /** Prompt and seed. */
  get description() {
    return `${this.subject}, seed ${this.body.seed}`;
  }

  /** Start or stop painting the mask. */
  paint(yes) {
    this.part(".mask").hidden = this.part(".painting").hidden = !yes;
    this.part(".change").hidden = yes || !this.figures;
    if (yes) this.part(".mask").focus();
    else this.mask.clear();
  }

  showImage(src) {
    Object.assign(this.part("img"), { src, alt: this.subject, hidden: false });
  }

  /** Update the panel. */
  show() {
    const { kinds, first, rows = this.model.rows, columns = this.model.columns, total = rows * columns } = this;
    const own = kinds.slice(first);  // a smaller first grid has no place in the image
    for (const canvas of this.element.querySelectorAll(".over, .map")) paint(canvas, own, rows, columns);
    this.part(".map").setAttribute("aria-label", describe(kinds));
    Object.assign(this.part("progress"), { value: kinds.length / total, hidden: Boolean(this.png) });
    this.part(".count").textContent = `${kinds.length} of ${total} tokens`;
    const { method, quality } = this.figures ?? {};
    const how = [`Seed ${this.body.seed}`, method && `, ${method}`, quality && ` (${quality})`];
    this.part(".how").textContent = how.filter(Boolean).join("");
    this.element.classList.toggle("blind", this.part("img").hidden);
  }

  /** Shell command that generates the same image, with the API key from an environment variable. */
  get command() {
    const quoted = JSON.stringify(this.body).replaceAll("'", "'\\''");
    return [
      `curl -s ${address(`v1/images/${this.endpoint}`)}`,
      "-H 'Content-Type: application/json'",
      ...(apiKey() ? ['-H "Authorization: Bearer $LANTERN_RT_API_KEY"'] : []),
      `-d '${quoted}' | ${this.shell}`,
    ].join(" \\\n  ");
  }

  async copyCommand() {
    const shown = this.part(".command"), button = this.part(".curl");
    shown.textContent = this.command;
    shown.hidden = false;
    await navigator.clipboard?.writeText(this.command).then(() => { button.textContent = "Copied"; }, () => {});
  }
}

/** Whether two PNG files hold the same image, byte for byte, whatever their text chunks. */
export function same(one, other) {
  return pixels(one.png) === pixels(other.png);
}

function pixels(base64) {
  const file = atob(base64), kept = [];
  for (let at = 8, length; at < file.length; at += 12 + length) {
    length = [...file.slice(at, at + 4)].reduce((sum, one) => sum * 256 + one.charCodeAt(0), 0);
    if (!file.slice(at + 4, at + 8).endsWith("Xt")) kept.push(file.slice(at, at + 12 + length));
  }
  return kept.join("");
}
