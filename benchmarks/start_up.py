"""Measure the start-up time of a pipeline in a new process, for one or several installations.

    python benchmarks/start_up.py                                                    # this installation, bundle scenes
    python benchmarks/start_up.py --python .venv/bin/python --python ../before/.venv/bin/python --rounds 15

The processes of the installations run in turn. The program prints medians and quartiles in milliseconds:

- load: load the pipeline with all graphs, including hashes and excluding imports;
- process: run the whole process, which generates one image;
- pass: one forward pass of the target.

There is no pass or fail.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

WORKER = """
import json, sys, time
import numpy, onnxruntime
from lantern_rt import Pipeline
import lantern_rt.engines.loader, lantern_rt.engines.ort.session
bundle, threads = sys.argv[1], int(sys.argv[2])
start = time.perf_counter()
pipe = Pipeline.from_bundle(bundle, threads=threads)
pipe.engines.load_all()
loaded = time.perf_counter() - start
condition = {"class_ids": 0} if pipe.bundle.manifest.condition.kind == "class" else {"prompts": "a red sphere on sand"}
stats = pipe(method="ar", **condition).stats
print(json.dumps({"load": 1e3 * loaded, "pass": 1e3 * stats.target_seconds / stats.target_passes}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", default="scenes")
    parser.add_argument(
        "--python", action="append", help="interpreter of an installation; can be repeated [default: this one]"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    installs = arguments.python or [sys.executable]
    runs: dict[str, list[dict[str, float]]] = {python: [] for python in installs}
    for turn in range(arguments.rounds):
        first = turn % len(installs)
        for python in installs[first:] + installs[:first]:
            start = time.perf_counter()
            command = [python, "-c", WORKER, arguments.bundle, str(arguments.threads)]
            worker = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            process = 1e3 * (time.perf_counter() - start)
            runs[python].append(json.loads(worker.stdout) | {"process": process})
    print(f"{arguments.bundle}, {arguments.threads} thread(s), milliseconds: median (quartiles)")
    for figure in ("load", "process", "pass"):
        for python, install_runs in runs.items():
            values = [run[figure] for run in install_runs]
            low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
            print(f"  {figure:8} {middle:9.2f} ({low:.2f} .. {high:.2f})  {python}")


if __name__ == "__main__":
    main()
