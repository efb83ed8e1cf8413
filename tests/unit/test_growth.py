"""Memory, open files, threads and objects of a process, which must not grow while the process generates images."""

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

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="reads memory from /proc/self/status, which only Linux has"
)


def measure_resources(work: str, count: int, folder: Path) -> list[Resources]:
    """Return the resources of a new process during the second half of its work, when all shapes have occurred."""
    bundle = make_tiny_bundle(folder / "tiny")
    program = [sys.executable, str(Path(__file__).with_name("growth.py")), work, str(bundle), str(count)]
    environment = os.environ | {"LANTERN_RT_CACHE": str(folder / "cache")}
    process = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    samples = [Resources(**json.loads(line)) for line in process.stdout.splitlines()]
    assert samples[-1].count >= count
    return samples[len(samples) // 2 :]


def compute_memory_slope(samples: list[Resources]) -> float:
    """Return the growth of memory in kilobytes per image or pipeline, fitted by least squares."""
    return float(np.polyfit([sample.count for sample in samples], [sample.kilobytes for sample in samples], 1)[0])


def check_other_resources(samples: list[Resources], temporary_files: int = 0) -> None:
    descriptors = [sample.descriptors for sample in samples]
    assert max(descriptors) - min(descriptors) <= temporary_files
    assert max(sample.threads for sample in samples) <= samples[0].threads
    earlier = samples[: len(samples) // 2]
    later = samples[len(samples) // 2 :]
    assert min(sample.objects for sample in later) - min(sample.objects for sample in earlier) < 500


@pytest.mark.parametrize(("work", "count"), [("images", 200), ("pipelines", 20), ("service", 200)])
def test_open_files_threads_and_objects_do_not_grow(work: str, count: int, tmp_path: Path) -> None:
    assert math.gcd(len(METHODS), len(BATCHES)) == 1, "some methods would never meet some batch sizes"
    check_other_resources(measure_resources(work, count, tmp_path), temporary_files=work == "service")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "count", "max_slope"), [("images", 1000, 10), ("pipelines", 400, 8), ("service", 4000, 2)]
)
def test_memory_does_not_grow_with_the_number_of_images(
    work: str, count: int, max_slope: float, tmp_path: Path
) -> None:
    """Check that memory grows by at most `max_slope` kilobytes per image or pipeline."""
    samples = measure_resources(work, count, tmp_path)
    check_other_resources(samples, temporary_files=work == "service")
    assert compute_memory_slope(samples) <= max_slope
