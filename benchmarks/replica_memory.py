"""What several replicas of a bundle on one host take: proportional set sizes (Pss), which share out shared pages.

python benchmarks/replica_memory.py scenes --replicas 1 2
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

REPLICA = """
import asyncio, sys
from lantern_rt import Pipeline
from lantern_rt.asynchronous import AsyncPipeline

pipeline = Pipeline.from_bundle(sys.argv[1], threads=1, picture_threads=1, engines=sys.argv[2] or None)
pipeline.warm_up()
service = AsyncPipeline(pipeline, together=8)
print("ready", flush=True)
sys.stdin.read()
"""
PARTS = ("Pss", "Pss_Anon", "Pss_File")


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of replicas that share a host.")
    parser.add_argument("bundle")
    parser.add_argument("--engines", default="", help="folder of `lantern-rt build-engine` to run")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2], help="how many at a time")
    arguments = parser.parse_args()
    for count in arguments.replicas:
        command = [sys.executable, "-c", REPLICA, arguments.bundle, arguments.engines]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        replicas = [subprocess.Popen(command, **pipes) for _ in range(count)]
        for replica in replicas:
            assert replica.stdout.readline() == "ready\n"
        found = [memory(replica.pid) for replica in replicas]
        total = ", ".join(f"{part} {sum(one[part] for one in found):,.0f}" for part in PARTS)
        print(f"{count} replicas, MB of all together: {total}; Rss of each {found[0]['Rss']:,.0f}")
        for replica in replicas:
            replica.communicate()


def memory(process: int) -> dict[str, float]:
    """MB of a process."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    return {name: int(kilobytes) * 1024 / 1e6 for name, kilobytes in re.findall(r"(\w+): +(\d+) kB", text)}


if __name__ == "__main__":
    main()
