"""Forward passes per image of GLM-Image's codes, beside one token per pass.

    python benchmarks/first_stage.py                    # GLM-Image's grids, few random weights; two minutes
    python benchmarks/first_stage.py --bundle bundles/glm-image --images 8
    python benchmarks/first_stage.py --smoke            # a small image: does it still run?

How many draft tokens random weights accept says nothing of a trained model. A second column therefore counts the passes
at the tokens per pass that the trained model of `--project` has, as `against_pytorch.py` does. `rows` is not exact, and
the number of its passes depends on the grid alone.
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
    """Return a row per method: passes per image of this bundle, and at the tokens per pass of the project."""
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
    parser.add_argument("--size", help="WIDTHxHEIGHT; default: that of the bundle")
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--project", default="scenes", help="trained bundle with the tokens per pass to count with")
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
