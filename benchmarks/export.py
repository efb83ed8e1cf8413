"""Measure the seconds, the peak memory and the bundle size of an export of random weights of published sizes.

    python benchmarks/export.py --shape GPT-XL --precision fp16
    python benchmarks/export.py --shape Emu3-8B --smoke            # tiny sizes, to test this program

The program first writes the checkpoint to disk tensor by tensor; the checkpoint of Anole includes a drafter. Checkpoint
and bundle together take twice the model's size in `--work` (default `work/`, which git ignores). Both are removed
afterwards, but a bundle in `--output` is kept.

Memory is the highest RssAnon of the process, which excludes mapped files. An export holds one matrix in float32 at a
time to compare graphs. The program exits with 1 if the memory exceeds 1.5 GB plus the larger of two sizes: the largest
matrix in float32, and 1.3 x the largest layer as stored.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from random_bundle import SHAPES, export_checkpoints, write_checkpoints

from lantern_rt import LanternError
from lantern_rt.export.space import STORED_BYTES
from lantern_rt.memory import PeakMemoryMonitor


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the cost of an export.")
    parser.add_argument("--shape", choices=SHAPES, default="GPT-XL")
    parser.add_argument("--precision", choices=STORED_BYTES, default="fp16")
    parser.add_argument("--layers", type=int, help="number of layers, to save disk space [default: all]")
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder for checkpoint and bundle")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="keep the bundle in this folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--smoke", action="store_true", help="a tiny model of the shape's family")
    arguments = parser.parse_args()
    tiny = {shape.family: name for name, shape in SHAPES.items() if name.startswith("tiny")}
    name = tiny[SHAPES[arguments.shape].family] if arguments.smoke else arguments.shape
    shape = SHAPES[name]
    precision = arguments.precision
    if arguments.layers:
        shape = replace(shape, num_layers=arguments.layers)
        name = f"{name}, {arguments.layers} layers"
    arguments.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder, PeakMemoryMonitor() as peak:
        start = time.perf_counter()
        checkpoints = Path(folder) / "checkpoints"
        bundle = arguments.output or Path(folder) / "bundle"

        def print_progress(message: str, done: int = 0, total: int = 0) -> None:
            if not done:
                print(f"  {time.perf_counter() - start:6.1f} s  {peak.bytes / 1e9:5.2f} GB  {message}", flush=True)

        write_checkpoints(shape, checkpoints, drafter=shape.family == "anole")
        print_progress(f"wrote checkpoints of {count_folder_bytes(checkpoints) / 1e9:.2f} GB")
        start = time.perf_counter()
        peak.bytes = 0
        export_checkpoints(shape, checkpoints, bundle, precision, progress=print_progress)
        figures = {"seconds": time.perf_counter() - start, "peak": peak.bytes, "bundle": count_folder_bytes(bundle)}
    largest_matrix = 4 * shape.hidden_size * max(shape.codes, 2 * shape.intermediate_size)  # float32
    allowed = 1.5e9 + max(largest_matrix, 1.3 * shape.num_layer_parameters * STORED_BYTES[precision])
    memory = f"peak memory {figures['peak'] / 1e9:.2f} GB (allowed {allowed / 1e9:.2f})"
    print(f"{name} {precision}: {figures['seconds']:.0f} s, {memory}, bundle {figures['bundle'] / 1e9:.2f} GB")
    if arguments.json:
        arguments.json.write_text(json.dumps({"shape": name, "precision": precision, "allowed": allowed} | figures))
    return 0 if figures["peak"] <= allowed else 1


def count_folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LanternError as error:
        sys.exit(f"export.py: {error}")
