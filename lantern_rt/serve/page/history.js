// Images of this visit as thumbnails, the newest first. They are kept in memory, and end with the page.

import { element } from "./figures.js";

const MAX_IMAGES = 24;

export class History {
  /** section: where the thumbnails stand. select: callback for an image whose thumbnail is clicked. */
  constructor(section, select) {
    Object.assign(this, { section, select, pictures: [] });
  }

  /** Add finished images. Returns the oldest ones, for which there is no room any more. */
  add(pictures) {
    this.pictures.unshift(...pictures);
    this.section.querySelector(".strip").prepend(...pictures.map((picture) => this.thumbnail(picture)));
    this.section.hidden = this.pictures.length < 2;
    const dropped = this.pictures.splice(MAX_IMAGES);
    for (const { thumbnail } of dropped) thumbnail.remove();
    return dropped;
  }

  thumbnail(picture) {
    const image = element("img", "", { src: picture.url, alt: picture.description });
    picture.thumbnail = element("button", image, { type: "button", title: picture.description });
    picture.thumbnail.addEventListener("click", () => this.select(picture));
    return picture.thumbnail;
  }

  /** Mark the thumbnails of the images that are shown in full. */
  mark(shown) {
    for (const picture of this.pictures) picture.thumbnail.ariaCurrent = String(shown.includes(picture));
  }
}
