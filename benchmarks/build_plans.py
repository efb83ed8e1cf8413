"""Random-weight models of LlamaGen's sizes to TensorRT-RTX plans, on a host that need not have a GPU.

    python benchmarks/build_plans.py                     # XL, float16 and float32, minutes
    python benchmarks/build_plans.py --size B --capability SM89

Prints seconds by the clock and of the processor, bytes and peak memory of every build. Does not run what it builds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from random_model import LLAMAGEN_3B, LLAMAGEN_B, LLAMAGEN_XL, SMOKE, build_random_model

from lantern_rt.engines.kv_cache import SPAN_STEP, round_up
from lantern_rt.engines.profiles import BuildOptions, Profile
from lantern_rt.engines.trt.backend import TensorRTBackend

SIZES = {"tiny": SMOKE, "B": LLAMAGEN_B, "XL": LLAMAGEN_XL, "3B": LLAMAGEN_3B}
PREFIX, ROWS, NODES = 120, 8, 64  # LlamaGen's caption; what `build-engine` takes by default


def main() -> None:
    """Write each graph once, and build every plan in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="XL")
    parser.add_argument("--capability", action="append")
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    capabilities = tuple(arguments.capability or ("SM89", "SM120"))
    if arguments.build:
        build(arguments.build, arguments.size, capabilities)
        return
    print(f"LlamaGen-{arguments.size} shapes, {', '.join(capabilities)}, tensorrt-rtx {library_version()}")
    print(f"{'graph':10} {'precision':10} {'seconds':>8} {'cpu s':>8} {'plan MB':>9} {'peak MB':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for compute in ("float16", "float32"):
            (own := Path(folder) / compute).mkdir()
            model = build_random_model(SIZES[arguments.size], own, compute)
            for graph in (model.target, model.drafter):
                command = [sys.executable, __file__, "--build", str(graph), "--size", arguments.size]
                command += [word for name in capabilities for word in ("--capability", name)]
                subprocess.run(command, check=True)


def build(path: Path, size: str, capabilities: tuple[str, ...]) -> None:
    """Build one plan and print its line."""
    past = round_up(PREFIX + SIZES[size].grid ** 2 + NODES)
    rows, spans = (1, 2, ROWS), (SPAN_STEP, round_up(past // 2), past)
    profiles = [
        Profile(name="prefill", rows=rows, nodes=(2, PREFIX, PREFIX), past=(SPAN_STEP,) * 3),
        Profile(name="ar", rows=rows, nodes=(2, 2, 2), past=spans),
        Profile(name="tree", rows=rows, nodes=(2, NODES, NODES), past=spans),
    ]
    bundle: Any = SimpleNamespace(path=lambda role: path)
    options = BuildOptions("tensorrt-rtx", max_rows=ROWS, max_nodes=NODES, compute_capabilities=capabilities)
    with tempfile.TemporaryDirectory() as folder:
        built = TensorRTBackend("tensorrt-rtx").build(
            bundle, path.stem, profiles, options, Path(folder), lambda what, done, total: None
        )
        plan = built.files[0].stat().st_size
    status = Path("/proc/self/status").read_text()  # Linux; getrusage would count the parent's peak
    peak = 1024 * int(status.split("VmHWM:")[1].split()[0])
    cpu = time.process_time()
    print(
        f"{path.stem:10} {path.parent.name:10} {built.seconds:8.1f} {cpu:8.1f} {plan / 1e6:9.0f} {peak / 1e6:9.0f}",
        flush=True,
    )


def library_version() -> str:
    """Of TensorRT-RTX; a LanternError if it is not installed."""
    return TensorRTBackend("tensorrt-rtx").version()


if __name__ == "__main__":
    main()
