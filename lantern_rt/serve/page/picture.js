// One picture while it is drawn: its panel on the page, its map and its figures.

import { describe, paint } from "./map.js";
import { address, apiKey, draw, ServerError } from "./server.js";

export class Picture {
  /** body: the request's own fields, also what the curl command sends. live: show the picture while it grows. */
  constructor(body, model, live, changed) {
    Object.assign(this, { body, model, live, changed, kinds: "", passes: 0, figures: null, png: "" });
    this.label = body.method;
    this.element = document.getElementById("panel").content.cloneNode(true).firstElementChild;
    this.part = (selector) => this.element.querySelector(selector);
    const [width, height] = (body.size ?? model.size).split("x").map(Number);
    this.part(".stage").style.aspectRatio = `${width} / ${height}`;
    this.part("h2").textContent = this.label;
    this.part(".curl").addEventListener("click", () => this.copyCommand());
    this.show();
  }

  /** Draw it to the end. Throws what stops it. */
  async draw(signal) {
    const { rows } = this.model;
    const partial_images = this.live ? Math.min(rows - 1, 64) : 0;
    this.began = performance.now();
    for await (const event of draw({ ...this.body, stream: true, steps: true, partial_images }, signal)) {
      if (event.type === "lantern.step") this.step(event);
      if (event.b64_json) this.showPicture(event.b64_json);
      if (event.type === "image_generation.completed") this.finish(event);
    }
    if (!this.png) throw new ServerError(0, "The connection ended before the picture was done.");
  }

  step({ kinds, done, total, rows, columns, method }) {
    const before = this.kinds.slice(0, done - kinds.length);  // a picture whose replica died begins anew
    Object.assign(this, { rows, columns, total, kinds: before + kinds, passes: before ? this.passes + 1 : 1 });
    const seconds = (performance.now() - this.began) / 1000;
    this.figures = { method, target_passes: this.passes, tokens_per_forward_pass: done / this.passes, seconds };
    this.changed();
  }

  finish({ b64_json, lantern, output_format = "png" }) {
    Object.assign(this, { figures: lantern, png: b64_json });
    const bytes = Uint8Array.from(atob(b64_json), (one) => one.charCodeAt(0)), save = this.part(".save");
    save.href = URL.createObjectURL(new Blob([bytes], { type: `image/${output_format}` }));
    save.download = `${lantern.model}-${lantern.seeds[0]}.${output_format}`;
    save.hidden = false;
    this.changed();
  }

  showPicture(base64) {
    const image = this.part("img");
    image.src = `data:image/png;base64,${base64}`;
    image.alt = this.body.prompt ?? `class ${this.body.class_id}`;
    image.hidden = false;
  }

  /** Bring the panel up to date. */
  show() {
    const { kinds, rows = this.model.rows, columns = this.model.columns, total = rows * columns } = this;
    for (const canvas of this.element.querySelectorAll("canvas")) paint(canvas, kinds, rows, columns);
    this.part(".map").setAttribute("aria-label", describe(kinds));
    this.part("progress").value = kinds.length / total;
    this.part(".count").textContent = `${kinds.length} of ${total} codes`;
    this.part(".how").textContent = this.figures?.choice ?? this.figures?.method ?? "";
    this.element.classList.toggle("blind", this.part("img").hidden);
  }

  /** A command that draws the same picture, the API key left to the environment. */
  get command() {
    const quoted = JSON.stringify(this.body).replaceAll("'", "'\\''");
    return [
      `curl -s ${address("v1/images/generations")}`,
      "-H 'Content-Type: application/json'",
      ...(apiKey() ? ['-H "Authorization: Bearer $LANTERN_API_KEY"'] : []),
      `-d '${quoted}' | jq -r '.data[0].b64_json' | base64 -d > picture.png`,
    ].join(" \\\n  ");
  }

  async copyCommand() {
    const shown = this.part(".command"), button = this.part(".curl");
    shown.textContent = this.command;
    shown.hidden = false;
    await navigator.clipboard?.writeText(this.command).then(() => { button.textContent = "Copied"; }, () => {});
  }
}

/** Whether two PNG files hold the same picture, byte for byte; texts about how it was made do not count. */
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
