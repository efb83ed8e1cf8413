"""Generate the comparison images of docs/seeds.md and docs/methods.md, with one row of images per method.

Each column has one prompt. Images are reduced to half of their width and height.

python benchmarks/same_seed.py docs/seeds/same_seed.png
python benchmarks/same_seed.py docs/methods/rows.png ar rows:window=8 rows:window=6 rows:window=4
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import mean

from PIL import Image, ImageDraw, ImageFont

from lantern_rt import Pipeline

METHODS = ("ar", "eagle:tree=dynamic-16", "sjd:window=7", "lantern++", "sjd:lambda=2")
PROMPTS = (
    "a large red sphere left of a small blue cube on grass at sunset",
    "a green cone on snow",
    "a yellow torus on sand at night",
    "a purple cylinder on water",
)
SEED = 3
MARGIN = 22


def main(path: str, methods: Sequence[str]) -> None:
    """Generate the images of all methods and write them to one PNG file."""
    pipeline = Pipeline.from_bundle("scenes")
    rows = [(method, [pipeline(prompt, seed=SEED, method=method) for prompt in PROMPTS]) for method in methods]
    width, height = (size // 2 for size in rows[0][1][0].images[0].size)
    sheet = Image.new("RGB", (width * len(PROMPTS), (height + MARGIN) * len(rows)), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default()
    for line, (method, results) in enumerate(rows):
        top = line * (height + MARGIN)
        tokens = mean(result.stats.tokens_per_forward_pass for result in results)
        draw.text((4, top + 4), f"{method}: {tokens:.2f} tokens per forward pass", "black", font)
        for column, result in enumerate(results):
            sheet.paste(result.images[0].reduce(2), (column * width, top + MARGIN))
    sheet.quantize(256, dither=Image.Dither.FLOYDSTEINBERG).save(path, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", help="PNG file to write")
    parser.add_argument("methods", nargs="*", default=METHODS)
    arguments = parser.parse_args()
    main(arguments.output, arguments.methods)
