// The codes of an image whose pixels another program makes: a map with a colour for each code, and a file.

import { Picture } from "./picture.js";

const CELL = 8;  // pixels of the map's file along each side of a cell

export class Codes extends Picture {
  endpoint = "codes";
  shell = "jq '.data[0]' > codes.json";

  get streamed() {
    return { ...this.body, stream: true, steps: true };
  }

  async finish({ codes, first_codes, lantern }) {
    const map = await drawn(codes);
    const data = new Uint8Array(await map.arrayBuffer());
    Object.assign(this, { figures: lantern, png: btoa(Array.from(data, (one) => String.fromCharCode(one)).join("")) });
    this.showFile(map);
    const save = this.part(".save");
    this.saved = URL.createObjectURL(new Blob([JSON.stringify({ codes, first_codes })], { type: "application/json" }));
    Object.assign(save, { href: this.saved, download: `${lantern.model}-${lantern.seeds[0]}.json`, hidden: false });
    save.textContent = "Save codes";
    this.changed();
  }

  release() {
    super.release();
    URL.revokeObjectURL(this.saved);
  }
}

/** Draw codes `[rows][columns]` as a PNG. Neighbouring numbers get different colours. */
function drawn(codes) {
  const canvas = document.createElement("canvas"), pen = canvas.getContext("2d");
  Object.assign(canvas, { width: codes[0].length * CELL, height: codes.length * CELL });
  codes.forEach((row, y) => row.forEach((code, x) => {
    pen.fillStyle = `hsl(${(code * 137.508) % 360} 60% ${35 + (code * 61) % 40}%)`;
    pen.fillRect(x * CELL, y * CELL, CELL, CELL);
  }));
  return new Promise((resolve) => canvas.toBlob(resolve));
}
