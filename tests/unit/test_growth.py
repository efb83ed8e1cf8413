"""What a process holds does not grow with what it has done: memory, open files, threads, objects."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from growth import BATCHES, METHODS, Held
from tiny_bundle import make_tiny_bundle

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is counted otherwise there")


def held(what: str, count: int, folder: Path) -> list[Held]:
    """Samples of a process of its own, from halfway on: by then memory of every shape was taken once."""
    bundle = make_tiny_bundle(folder / "tiny")
    program = [sys.executable, str(Path(__file__).with_name("growth.py")), what, str(bundle), str(count)]
    surroundings = os.environ | {"LANTERN_RT_CACHE": str(folder / "cache")}
    done = subprocess.run(program, env=surroundings, capture_output=True, text=True, check=True)
    samples = [Held(**json.loads(line)) for line in done.stdout.splitlines()]
    assert samples[-1].count >= count
    return samples[len(samples) // 2 :]


def slope(samples: list[Held]) -> float:
    """Kilobytes an image, or a pipeline; the least-squares line."""
    return float(np.polyfit([one.count for one in samples], [one.kilobytes for one in samples], 1)[0])


def check_steady(samples: list[Held], passing: int = 0) -> None:
    """passing: files that another thread may have open at the moment of a sample."""
    assert max(one.descriptors for one in samples) - min(one.descriptors for one in samples) <= passing
    assert max(one.threads for one in samples) <= samples[0].threads
    assert max(one.objects for one in samples) - min(one.objects for one in samples) < 1000


def test_hundreds_of_images_of_every_method_and_batch_size_leave_no_objects_files_or_threads(tmp_path: Path) -> None:
    assert math.gcd(len(METHODS), len(BATCHES)) == 1, "or some would never meet"
    check_steady(held("images", 200, tmp_path))


def test_dozens_of_pipelines_that_were_dropped_leave_no_objects_files_or_threads(tmp_path: Path) -> None:
    check_steady(held("pipelines", 20, tmp_path))


@pytest.mark.slow
def test_a_thousand_images_take_no_more_memory_than_five_hundred(tmp_path: Path) -> None:
    samples = held("images", 1000, tmp_path)
    check_steady(samples)
    assert slope(samples) <= 1024 / 100, "at most 1 MB per 100 images"


@pytest.mark.slow
def test_four_hundred_pipelines_that_were_dropped_take_no_more_memory_than_two_hundred(tmp_path: Path) -> None:
    samples = held("pipelines", 400, tmp_path)
    check_steady(samples)
    assert slope(samples) <= 8, "kilobytes a pipeline"


def test_a_hundred_requests_of_a_service_get_their_own_images_and_leave_nothing(tmp_path: Path) -> None:
    check_steady(held("service", 200, tmp_path), passing=1)


@pytest.mark.slow
def test_two_thousand_requests_of_a_service_take_no_more_memory_than_one_thousand(tmp_path: Path) -> None:
    samples = held("service", 4000, tmp_path)
    check_steady(samples, passing=1)
    assert slope(samples) <= 2048 / 1000, "at most 2 MB per 1,000 images"
