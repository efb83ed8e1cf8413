"""Count the forward passes per image that each method needs for the codes of GLM-Image.

    python benchmarks/first_stage.py                    # GLM-Image's grids, few random weights; two minutes
    python benchmarks/first_stage.py --bundle bundles/glm-image --images 8
    python benchmarks/first_stage.py --smoke            # a small image, to test this program

The acceptance rate with random weights differs from that of a trained model. A second column therefore computes the
passes from the tokens per pass of the trained bundle `--project`, like `against_pytorch.py`. The method `rows` is not
exact, and its number of passes depends only on the grid.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import replace
from pathlib import Path

from against_pytorch import measure_tokens_per_pass
from random_bundle import SHAPES, random_bundle

from lantern_rt import Pipeline
from lantern_rt.cli.console import print_table

METHODS = ("ar", "sjd:window=7", "sjd:window=15", "rows:window=8")
COLUMNS = {"method": "{method}", "passes": "{passes:.0f}", "passes at the project's rate": "{projected:.0f}"}


def count_passes(
    pipeline: Pipeline, size: str | None, num_images: int, bundle_name: str
) -> list[dict[str, str | float]]:
    """Return a table row for each method with the passes per image, counted and projected.

    Args:
        pipeline: pipeline of GLM-Image.
        size: image size as WIDTHxHEIGHT; None for the default size.
        num_images: number of images to generate.
        bundle_name: trained bundle whose tokens per pass give the projected passes.
    """
    codes = pipeline.bundle.manifest.size(size).codes
    rows: list[dict[str, str | float]] = []
    for method in METHODS:
        stats = pipeline("a red cube", size=size, num_images=num_images, method=method).stats
        passes = sum(image.target_passes for image in stats.per_image) / num_images
        rate = measure_tokens_per_pass(bundle_name, method)
        rows.append(
            {"method": method, "passes": passes, "projected": passes if rate is None else math.ceil(codes / rate)}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="bundle of GLM-Image; default: few random weights")
    parser.add_argument("--size", help="WIDTHxHEIGHT; default: the size of the bundle")
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--project", default="scenes", help="trained bundle whose tokens per pass are used")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = replace(SHAPES["tiny-glm-image"], grid=2 if arguments.smoke else 32)
        bundle = arguments.bundle or random_bundle(shape, Path(folder) / "glm-image")
        with Pipeline.from_bundle(bundle) as pipeline:
            size = pipeline.bundle.manifest.size(arguments.size)
            print(f"{size.name}: {size.codes:,} codes per image, of which {size.first_codes} are of the small grid")
            rows = count_passes(pipeline, size.name, arguments.images, arguments.project)
    print_table(COLUMNS, rows)


if __name__ == "__main__":
    main()
