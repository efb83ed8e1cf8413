"""The resources of a process do not grow with the work that it has done: memory, open files, threads, objects."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from growth import BATCHES, METHODS, Resources
from tiny_bundle import make_tiny_bundle

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is counted otherwise there")


def measure(work: str, count: int, folder: Path) -> list[Resources]:
    """Measure a new process during its work, from halfway on: by then memory of every shape has been allocated once.

    Args:
        work: kind of work, as in `growth.py`.
        count: number of images or pipelines.
        folder: folder for the bundle and its cache.
    """
    bundle = make_tiny_bundle(folder / "tiny")
    program = [sys.executable, str(Path(__file__).with_name("growth.py")), work, str(bundle), str(count)]
    environment = os.environ | {"LANTERN_RT_CACHE": str(folder / "cache")}
    process = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    samples = [Resources(**json.loads(line)) for line in process.stdout.splitlines()]
    assert samples[-1].count >= count
    return samples[len(samples) // 2 :]


def slope(samples: list[Resources]) -> float:
    """Return the least-squares growth in kilobytes per image or pipeline."""
    return float(np.polyfit([sample.count for sample in samples], [sample.kilobytes for sample in samples], 1)[0])


def check_steady(samples: list[Resources], temporary_files: int = 0) -> None:
    """Check that open files, threads and objects do not grow.

    Args:
        samples: resources at increasing counts.
        temporary_files: number of files that another thread may have open during a sample.
    """
    descriptors = [sample.descriptors for sample in samples]
    assert max(descriptors) - min(descriptors) <= temporary_files
    assert max(sample.threads for sample in samples) <= samples[0].threads
    earlier = samples[: len(samples) // 2]
    later = samples[len(samples) // 2 :]
    assert min(sample.objects for sample in later) - min(sample.objects for sample in earlier) < 500


@pytest.mark.parametrize(("work", "count"), [("images", 200), ("pipelines", 20), ("service", 200)])
def test_open_files_threads_and_objects_do_not_grow(work: str, count: int, tmp_path: Path) -> None:
    assert math.gcd(len(METHODS), len(BATCHES)) == 1, "some methods would never meet some batch sizes"
    check_steady(measure(work, count, tmp_path), temporary_files=work == "service")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "count", "max_slope"), [("images", 1000, 10), ("pipelines", 400, 8), ("service", 4000, 2)]
)
def test_memory_does_not_grow(work: str, count: int, max_slope: float, tmp_path: Path) -> None:
    """Check that memory grows by at most `max_slope` kilobytes per image or pipeline."""
    samples = measure(work, count, tmp_path)
    check_steady(samples, temporary_files=work == "service")
    assert slope(samples) <= max_slope
