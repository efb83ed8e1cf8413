// A mask that the user paints over an image, and its file for an edit request.

export class Mask {
  /**
   * canvas: canvas over the image, `width` x `height` pixels. brush: input of the stroke width, in 1/256 of the canvas.
   * cell: element that shows the chosen one of `rows` x `columns` cells, which keys move and paint.
   */
  constructor(canvas, brush, cell, { width, height, rows, columns }) {
    Object.assign(this, { canvas, brush, cell, rows, columns, row: 0, column: 0 });
    Object.assign(canvas, { width, height });
    this.pen = canvas.getContext("2d", { willReadFrequently: true });
    Object.assign(this.pen, { lineCap: "round", lineJoin: "round", strokeStyle: "#d81b60" });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.at = null;
      this.stroke(event);
    });
    canvas.addEventListener("pointermove", (event) => { if (event.buttons) this.stroke(event); });
    canvas.addEventListener("keydown", (event) => {
      const act = { " ": () => this.toggle(), ArrowUp: () => this.move(-1, 0), ArrowDown: () => this.move(1, 0),
        ArrowLeft: () => this.move(0, -1), ArrowRight: () => this.move(0, 1) }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    });
    canvas.addEventListener("focus", () => this.move(0, 0));
  }

  get empty() {
    return !this.pen.getImageData(0, 0, this.canvas.width, this.canvas.height).data.some(Boolean);
  }

  /** Choose the cell that is so many rows and columns further. */
  move(rows, columns) {
    this.row = Math.min(this.rows - 1, Math.max(0, this.row + rows));
    this.column = Math.min(this.columns - 1, Math.max(0, this.column + columns));
    const { left, top, width, height } = this.box(100, 100);
    Object.assign(this.cell.style, { left: `${left}%`, top: `${top}%`, width: `${width}%`, height: `${height}%` });
  }

  /** Paint the chosen cell, or clear it if it is painted. */
  toggle() {
    const { left, top, width, height } = this.box(this.canvas.width, this.canvas.height);
    const [, , , painted] = this.pen.getImageData(left + width / 2, top + height / 2, 1, 1).data;
    this.pen.fillStyle = this.pen.strokeStyle;
    this.pen[painted ? "clearRect" : "fillRect"](left, top, width, height);
  }

  /** Place and size of the chosen cell in an area. */
  box(wide, high) {
    const width = wide / this.columns, height = high / this.rows;
    return { left: this.column * width, top: this.row * height, width, height };
  }

  stroke(event) {
    const { left, top, width, height } = this.canvas.getBoundingClientRect();
    const to = [(event.clientX - left) / width * this.canvas.width, (event.clientY - top) / height * this.canvas.height];
    this.pen.lineWidth = this.brush.value * this.canvas.width / 256;
    this.pen.beginPath();
    this.pen.moveTo(...(this.at ?? to));
    this.pen.lineTo(...to);
    this.pen.stroke();
    this.at = to;
  }

  clear() {
    this.pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
  }

  /** Create a PNG that is transparent where the user painted. */
  file() {
    const { width, height } = this.canvas, made = Object.assign(document.createElement("canvas"), { width, height });
    const pen = made.getContext("2d");
    pen.fillRect(0, 0, width, height);
    pen.globalCompositeOperation = "destination-out";
    pen.drawImage(this.canvas, 0, 0);
    return png(made);
  }
}

export const png = (canvas) => new Promise((done) => { canvas.toBlob(done, "image/png"); });

/** Scale and crop an image file to a size, as PNG. */
export async function fitted(file, width, height) {
  const image = await createImageBitmap(file), scale = Math.max(width / image.width, height / image.height);
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const [wide, high] = [image.width * scale, image.height * scale];
  const pen = canvas.getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.drawImage(image, (width - wide) / 2, (height - high) / 2, wide, high);
  return png(canvas);
}
