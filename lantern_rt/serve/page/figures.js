// Statistics of the images: a table with a column per image, and a comparison in words.

import { count, paint, used } from "./map.js";
import { same } from "./picture.js";

const FIGURES = [
  ["Tokens per forward pass", ({ figures }) => figures.tokens_per_forward_pass.toFixed(2)],
  ["Target passes", ({ figures }) => figures.target_passes],
  ["Seconds", ({ figures }) => figures.seconds.toFixed(2)],
  ["Tokens per second", ({ figures, kinds }) => Math.round((kinds.length - count(kinds, "k")) / figures.seconds)],
  ["Change per token (TVD)", ({ figures }) => figures.realised_tvd_per_token?.toFixed(4).replace(/^0\.0000$/, "0")],
];

const ALIKE = 1.05;  // a single run tells no smaller difference

export function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  made.append(text ?? "");
  return Object.assign(made, attributes);
}

/** Build the head and bodies of the table. */
export function rows(pictures) {
  const row = (head, ...cells) => {
    const made = element("tr");
    made.append(head, ...cells.map((text) => element("td", text ?? "–")));
    return made;
  };
  const title = (text) => element("th", text, { scope: "row" });
  const head = element("tr");
  head.append(element("td"), ...pictures.map(({ label }) => element("th", label, { scope: "col" })));
  const kinds = used(pictures.map((one) => one.kinds).join("")).map(([kind, { text }]) => {
    const name = title(""), swatch = element("canvas", "", { className: "swatch" });
    paint(swatch, kind, 1, 1);
    name.append(swatch, text);
    return row(name, ...pictures.map((one) => one.kinds && count(one.kinds, kind)));
  });
  const figures = FIGURES.map(([text, value]) =>
    row(title(text), ...pictures.map((one) => one.figures && value(one))));
  const factor = pictures.length === 2 && pictures.every(({ png }) => png) && speedUp(...pictures);
  if (factor >= ALIKE) {
    const slowest = Math.max(...pictures.map(({ figures }) => figures.seconds));
    figures.unshift(row(title("Speed-up"), ...pictures.map(({ figures }) => (slowest / figures.seconds).toFixed(2))));
  }
  const parts = [["thead", [head]], ["tbody", kinds], ["tbody", figures]];
  return parts.map(([tag, lines]) => {
    const part = element(tag);
    part.append(...lines);
    return part;
  });
}

/** Return how many times as fast as the other the faster of two methods was; null for one method, run twice. */
function speedUp(one, two) {
  const times = one.figures.seconds / two.figures.seconds;
  return one.figures.method === two.figures.method ? null : Math.max(times, 1 / times);
}

/** Compare the methods of two images with the same seed. */
export function compared(one, two) {
  const [fast, slow] = [one, two].toSorted((a, b) => a.figures.seconds - b.figures.seconds);
  const factor = speedUp(one, two);
  const relaxed = [one, two].some(({ figures }) => figures.realised_tvd_per_token > 0);
  const alike = same(one, two) ? "Same image, byte for byte." :
    `Different images${relaxed ? ": relaxed acceptance may change them" : ""}.`;
  if (factor === null) return `The same method twice: ${[...new Set([one.label, two.label])].join(" and ")}. ${alike}`;
  if (factor < ALIKE) return `${one.label} was about as fast as ${two.label}. ${alike}`;
  return `${fast.label} was about ${factor.toFixed(1)} times as fast as ${slow.label}. ${alike}`;
}
