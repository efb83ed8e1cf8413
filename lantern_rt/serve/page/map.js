// Map of the origin of each token: colours (Okabe and Ito's, safe for colour-blind eyes), marks and words.

export const KINDS = {
  d: { colour: "#0072b2", text: "drafted and accepted" },
  r: { colour: "#e69f00", mark: "M5.5 5.5h.01", ink: "#000", width: 4, text: "accepted by relaxation" },
  x: { colour: "#d55e00", mark: "M3 3L8 8M8 3L3 8", ink: "#fff", width: 1.2, text: "draft rejected, resampled" },
  n: { colour: "#c3c9d1", text: "nothing drafted" },
  k: { colour: "#009e73", text: "preserved by the edit" },
};

/** Paint `kinds`, one letter per token in raster order, on a grid of rows and columns. */
export function paint(canvas, kinds, rows, columns) {
  const shown = canvas.clientWidth * devicePixelRatio / columns, cell = Math.max(4, Math.round(shown || 28));
  canvas.width = columns * cell;
  canvas.height = rows * cell;
  const pen = canvas.getContext("2d"), unit = cell / 11;  // a cell is 11 units wide
  pen.lineCap = "round";
  [...kinds].forEach((kind, i) => {
    const { colour, mark, ink, width } = KINDS[kind] ?? KINDS.n;
    pen.setTransform(unit, 0, 0, unit, (i % columns) * cell, Math.floor(i / columns) * cell);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 11 - 1 / unit, 11 - 1 / unit);
    pen.lineWidth = width;
    pen.strokeStyle = ink;
    if (mark) pen.stroke(new Path2D(mark));
  });
}

/** Kinds to list: all, but "preserved" only if it occurs. */
export function used(kinds) {
  return Object.entries(KINDS).filter(([kind]) => kind !== "k" || kinds.includes(kind));
}

export function count(kinds, kind) {
  return kinds.split(kind).length - 1;
}

/** Describe the map in words. */
export function describe(kinds) {
  const parts = used(kinds).map(([kind, { text }]) => `${count(kinds, kind)} ${text}`);
  return `Map of ${kinds.length} tokens: ${parts.join(", ")}`;
}
