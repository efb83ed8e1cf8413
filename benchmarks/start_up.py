"""Does `build-engine` make runs start faster, and steps no slower? Raw bundle and built engines, in turns.

    python benchmarks/start_up.py                        # scenes, 7 rounds
    python benchmarks/start_up.py --bundle bundles/llamagen-b --rounds 15

Every round starts a fresh process for each, alternating which goes first. Printed, as medians and quartiles: time to a
pipeline with all graphs loaded (hashes included, imports apart) by the clock and of the processor, the whole process,
the target per pass. Never judges.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lantern_rt import open_bundle
from lantern_rt.engines.build import build_engines
from lantern_rt.engines.profiles import BuildOptions

WORKER = """
import json, sys, time
import numpy, onnxruntime
from lantern_rt import Pipeline
import lantern_rt.pipeline, lantern_rt.engines.loader, lantern_rt.engines.ort.session
bundle, engines, threads = sys.argv[1], sys.argv[2] or None, int(sys.argv[3])
start, cpu = time.perf_counter(), time.process_time()
pipe = Pipeline.from_bundle(bundle, threads=threads, engines=engines)
pipe._engines.load_all()
loaded, cpu = time.perf_counter() - start, time.process_time() - cpu
kind = pipe.bundle.manifest.condition.kind
what = {"class_ids": 0} if kind == "class" else {"prompts": "a red sphere on sand"}
pipe(method="ar", **what)  # warm
stats = pipe(method="ar", **what).stats
print(json.dumps({"load": loaded, "load_cpu": cpu, "pass": stats.target_seconds / stats.target_passes}))
"""


def main() -> None:
    """Build once, run in turns, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", default="scenes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engines = Path(folder) / "engines"
        build_engines(
            open_bundle(arguments.bundle),
            arguments.bundle,
            BuildOptions("onnxruntime"),
            engines,
            False,
            lambda what, done, total: None,
        )
        found: dict[str, list[dict[str, float]]] = {"raw bundle": [], "engines": []}
        for turn in range(arguments.rounds):
            kinds = [("raw bundle", ""), ("engines", str(engines))]
            for kind, path in kinds if turn % 2 else reversed(kinds):
                start = time.perf_counter()
                command = [sys.executable, "-c", WORKER, arguments.bundle, path, str(arguments.threads)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found[kind].append(json.loads(done.stdout) | {"process": time.perf_counter() - start})
    print(f"{arguments.bundle}, {arguments.threads} thread(s), {arguments.rounds} rounds: median (quartiles)")
    for name, unit, scale in (("load", "ms", 1e3), ("load_cpu", "ms", 1e3), ("process", "s", 1.0), ("pass", "ms", 1e3)):
        for kind, runs in found.items():
            values = sorted(scale * run[name] for run in runs)
            low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
            print(f"  {name:8} {kind:11} {middle:9.2f} {unit:3} ({low:.2f} .. {high:.2f})")


if __name__ == "__main__":
    main()
