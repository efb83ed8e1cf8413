"""Does `build-engine` make runs start faster, and steps no slower? Raw bundle and built engines, in turns.

    python benchmarks/start_up.py                        # scenes, 7 rounds
    python benchmarks/start_up.py --bundle bundles/llamagen-b --rounds 15

Every round starts a fresh process for each, alternating which goes first. Printed, as medians and quartiles: time to a
pipeline with all graphs loaded (hashes included, imports apart), the whole process, the target per pass. Never judges.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from lantern_rt import open_bundle
from lantern_rt.engines.build import build_engines
from lantern_rt.engines.profiles import BuildOptions

WORKER = """
import json, sys, time
import numpy, onnxruntime
from lantern_rt import Pipeline
import lantern_rt.engines.loader, lantern_rt.engines.ort.session
bundle, engines, threads = sys.argv[1], sys.argv[2] or None, int(sys.argv[3])
start = time.perf_counter()
pipe = Pipeline.from_bundle(bundle, threads=threads, engines=engines)
pipe.engines.load_all()
loaded = time.perf_counter() - start
what = {"class_ids": 0} if pipe.bundle.manifest.condition.kind == "class" else {"prompts": "a red sphere on sand"}
pipe(method="ar", **what)  # warm
stats = pipe(method="ar", **what).stats
print(json.dumps({"load": 1e3 * loaded, "pass": 1e3 * stats.target_seconds / stats.target_passes}))
"""


def main() -> None:
    """Build once, run in turns, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", default="scenes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures there")
    parser.add_argument("--smoke", action="store_true", help="one round")
    arguments = parser.parse_args()
    name, found = arguments.bundle, defaultdict[str, list[dict[str, float]]](list)
    with tempfile.TemporaryDirectory() as folder:
        engines = Path(folder) / "engines"
        build_engines(open_bundle(name), name, BuildOptions("onnxruntime"), engines, False, lambda *_: None)
        paths = [("raw bundle", ""), ("engines", str(engines))]
        for turn in range(1 if arguments.smoke else arguments.rounds):
            for kind, path in paths if turn % 2 else reversed(paths):
                start = time.perf_counter()
                command = [sys.executable, "-c", WORKER, name, path, str(arguments.threads)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                process = 1e3 * (time.perf_counter() - start)
                found[kind].append(json.loads(done.stdout) | {"process": process})
    print(f"{name}, {arguments.threads} thread(s), milliseconds: median (quartiles)")
    for figure in ("load", "process", "pass"):
        for kind, runs in found.items():
            values = [run[figure] for run in runs]
            low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
            print(f"  {figure:8} {kind:11} {middle:9.2f} ({low:.2f} .. {high:.2f})")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
