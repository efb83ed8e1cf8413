"""What an export costs, and the plans of the bundle: seconds, peak memory, bytes, on random published sizes.

    python benchmarks/export.py --shape GPT-XL --precision fp16
    python benchmarks/export.py --shape Anole-7B --precision fp16 --keep
    python benchmarks/export.py --shape GPT-XL --drafter --compute float16 --plans SM89,SM120
    python benchmarks/export.py --shape Emu3-8B --smoke            # does it still run?

The checkpoint, Anole's always with a drafter, is written to disk piece by piece first; with the bundle it takes twice
the model's size in `--work` (default `work/`, which git ignores) and is removed afterwards, but for the bundle with
`--keep`. Memory is what the process holds without mapped files (RssAnon), at its highest; that of the export is judged
against 1.3 x the largest layer as stored in the bundle + 1.5 GB. Plans are TensorRT-RTX's with `build-engine`'s own
ranges, built on a host that need not have a GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from random_bundle import SHAPES, export_checkpoints, write_checkpoints

from lantern_rt import LanternError, open_bundle
from lantern_rt.cli.memory import PeakMemory
from lantern_rt.engines.profiles import BuildOptions, profiles
from lantern_rt.engines.trt.backend import find_backend

# Bytes a weight as stored.
BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16-safe": 2.0, "int8-weights": 1.0625, "int4-weights": 0.625}


def main() -> int:
    parser = argparse.ArgumentParser(description="What an export costs.")
    parser.add_argument("--shape", choices=SHAPES, default="GPT-XL")
    parser.add_argument("--precision", choices=BYTES, default="fp16")
    parser.add_argument("--compute", choices=("float32", "float16"), default="float32")
    parser.add_argument("--drafter", action="store_true", help="with a drafter")
    parser.add_argument("--plans", metavar="SM89,...", help="build TensorRT-RTX plans for these GPUs from the bundle")
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder for checkpoint and bundle")
    parser.add_argument("--keep", action="store_true", help="keep the bundle")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--smoke", action="store_true", help="a tiny model of the shape's family")
    arguments = parser.parse_args()
    if arguments.drafter and SHAPES[arguments.shape].family == "emu3":
        parser.error("Emu3 has no drafters; leave --drafter out")
    tiny = {shape.family: name for name, shape in SHAPES.items() if name.startswith("tiny")}
    name = tiny[SHAPES[arguments.shape].family] if arguments.smoke else arguments.shape
    precision = arguments.precision
    shape, bundle = SHAPES[name], arguments.work / f"bundle-{name}-{precision}"
    arguments.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder, PeakMemory() as peak:
        start, checkpoints = time.perf_counter(), Path(folder) / "checkpoints"

        def say(line: str, done: int = 0, total: int = 0) -> None:
            if done:
                return
            print(f"  {time.perf_counter() - start:6.1f} s  {peak.bytes / 1e9:5.2f} GB  {line}", flush=True)

        write_checkpoints(shape, checkpoints, arguments.drafter or shape.family == "anole")
        say(f"wrote checkpoints of {folder_bytes(checkpoints) / 1e9:.2f} GB")
        start, peak.bytes = time.perf_counter(), 0
        export_checkpoints(shape, checkpoints, bundle, precision, arguments.compute, say)
        seconds = time.perf_counter() - start
    bound = 1.3 * shape.layer_parameters * BYTES[precision] + 1.5e9
    figures: dict[str, Any] = {"seconds": seconds, "peak_bytes": peak.bytes, "allowed_bytes": bound}
    figures["bundle_bytes"] = folder_bytes(bundle)
    print(
        f"{name} {precision}: {seconds:.0f} s, peak memory {peak.bytes / 1e9:.2f} GB (allowed {bound / 1e9:.2f}), "
        f"bundle {figures['bundle_bytes'] / 1e9:.2f} GB"
    )
    if arguments.plans:
        figures["plans"] = build_plans(bundle, tuple(arguments.plans.split(",")))
    if arguments.json:
        arguments.json.write_text(json.dumps(vars(arguments) | {"shape": name} | figures, default=str))
    if not arguments.keep:
        shutil.rmtree(bundle)
    return 0 if peak.bytes <= bound else 1


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def build_plans(folder: Path, capabilities: tuple[str, ...]) -> list[dict[str, Any]]:
    """Build every graph's plan, print its line and remove it."""
    bundle, backend = open_bundle(folder, verify=False), find_backend("tensorrt-rtx")
    options = BuildOptions(backend.name, compute_capabilities=capabilities)
    found = []
    for role in (role for role in backend.roles if role in bundle.manifest.files):
        output = folder.with_name(f"{folder.name}-{role}")
        output.mkdir()
        cpu, began = time.process_time(), time.perf_counter()
        try:
            with PeakMemory() as peak:
                backend.build(bundle, role, profiles(bundle.manifest, role, options), options, output, lambda *_: None)
            plan: dict[str, Any] = {
                "role": role,
                "seconds": time.perf_counter() - began,
                "bytes": folder_bytes(output),
                "peak_bytes": peak.bytes,
            }
        finally:
            shutil.rmtree(output)
        plan["cpu_seconds"] = time.process_time() - cpu
        print(
            f"  {role} for {', '.join(capabilities)}: {plan['seconds']:.1f} s, {plan['cpu_seconds']:.1f} s of the "
            f"processor, plan {plan['bytes'] / 1e6:.0f} MB, peak memory {plan['peak_bytes'] / 1e6:.0f} MB",
            flush=True,
        )
        found.append(plan)
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LanternError as error:
        sys.exit(f"export.py: {error}")
