"""What an export costs: seconds, peak memory and size of the bundle, on random checkpoints of published shapes.

    python benchmarks/export.py --shape GPT-XL --precision fp16
    python benchmarks/export.py --shape Anole-7B --precision fp16 --keep
    python benchmarks/export.py --shape tiny                       # does it still run?

The checkpoint, Anole's with a drafter, is written to disk piece by piece first; with the bundle it takes twice the
model's size in `--work` (default `work/`, which git ignores) and is removed afterwards, but for the bundle with
`--keep`. Memory is what the process holds without mapped files (RssAnon), at its highest
during the export; it is judged against 1.3 x the largest layer as stored in the bundle + 1.5 GB.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from functools import partial
from pathlib import Path

from random_checkpoints import SHAPES, write_checkpoints

from lantern_rt.cli.families import export_family
from lantern_rt.cli.memory import PeakMemory
from lantern_rt.export.graph.precision import read_precisions
from lantern_rt.export.writer import write_bundle

# Bytes a weight as stored.
BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16-safe": 2.0, "int8-weights": 1.0625, "int4-weights": 0.625}


def main() -> int:
    parser = argparse.ArgumentParser(description="What an export costs.")
    parser.add_argument("--shape", choices=SHAPES, default="GPT-XL")
    parser.add_argument("--precision", choices=BYTES, default="fp16")
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder for checkpoint and bundle")
    parser.add_argument("--keep", action="store_true", help="keep the bundle")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    work = arguments.work / f"export-{arguments.shape}"
    work.mkdir(parents=True)
    try:
        start = time.perf_counter()
        family, checkpoints = write_checkpoints(shape, work)
        size = sum(file.stat().st_size for file in work.rglob("*") if file.is_file())
        print(f"checkpoint: {size / 1e9:.2f} GB in {time.perf_counter() - start:.0f} s")
        start = time.perf_counter()
        bundle = arguments.work / f"bundle-{arguments.shape}-{arguments.precision}"
        with PeakMemory() as peak:
            common = {
                "write": partial(write_bundle, precisions=read_precisions(arguments.precision)),
                "progress": lambda line: print(
                    f"  {time.perf_counter() - start:6.1f} s  {(peak.bytes or 0) / 1e9:5.2f} GB  {line}", flush=True
                ),
            }
            export_family(family, checkpoints, bundle, common)
        seconds = time.perf_counter() - start
    finally:
        shutil.rmtree(work)
    size = sum(file.stat().st_size for file in bundle.iterdir())
    bound = 1.3 * shape.layer_numbers * BYTES[arguments.precision] + 1.5e9
    print(
        f"{arguments.shape} {arguments.precision}: {seconds:.0f} s, peak memory {(peak.bytes or 0) / 1e9:.2f} GB "
        f"(allowed {bound / 1e9:.2f}), bundle {size / 1e9:.2f} GB"
    )
    if arguments.json:
        figures = {"seconds": seconds, "peak_bytes": peak.bytes, "allowed_bytes": bound, "bundle_bytes": size}
        arguments.json.write_text(json.dumps({"shape": arguments.shape, **vars(arguments), **figures}, default=str))
    if not arguments.keep:
        shutil.rmtree(bundle)
    return 0 if (peak.bytes or 0) <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
