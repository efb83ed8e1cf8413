// A mask that the user paints over an image, and its file for an edit request.

export class Mask {
  /** canvas: canvas over the image, of the same size in pixels. brush: input of the stroke width, in 1/256 of the canvas. */
  constructor(canvas, brush, width, height) {
    Object.assign(this, { canvas, brush, empty: true });
    Object.assign(canvas, { width, height });
    this.pen = canvas.getContext("2d");
    Object.assign(this.pen, { lineCap: "round", lineJoin: "round", strokeStyle: "#d81b60" });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.at = null;
      this.stroke(event);
    });
    canvas.addEventListener("pointermove", (event) => { if (event.buttons) this.stroke(event); });
  }

  stroke(event) {
    const { left, top, width, height } = this.canvas.getBoundingClientRect();
    const to = [(event.clientX - left) / width * this.canvas.width, (event.clientY - top) / height * this.canvas.height];
    this.pen.lineWidth = this.brush.value * this.canvas.width / 256;
    this.pen.beginPath();
    this.pen.moveTo(...(this.at ?? to));
    this.pen.lineTo(...to);
    this.pen.stroke();
    Object.assign(this, { at: to, empty: false });
  }

  clear() {
    this.pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.empty = true;
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
