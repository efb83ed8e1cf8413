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
    """passing: files that another thread may have open at the moment of a sample, as a race may hold objects then."""
    assert max(one.descriptors for one in samples) - min(one.descriptors for one in samples) <= passing
    assert max(one.threads for one in samples) <= samples[0].threads
    earlier = samples[: len(samples) // 2]
    later = samples[len(samples) // 2 :]
    assert min(one.objects for one in later) - min(one.objects for one in earlier) < 500


@pytest.mark.parametrize(("what", "count"), [("images", 200), ("pipelines", 20), ("service", 200)])
def test_nothing_is_left_of_what_was_done(what: str, count: int, tmp_path: Path) -> None:
    assert math.gcd(len(METHODS), len(BATCHES)) == 1, "or some would never meet"
    check_steady(held(what, count, tmp_path), passing=what == "service")


@pytest.mark.slow
@pytest.mark.parametrize(("what", "count", "most"), [("images", 1000, 10), ("pipelines", 400, 8), ("service", 4000, 2)])
def test_memory_does_not_grow(what: str, count: int, most: float, tmp_path: Path) -> None:
    """By no more than so many kilobytes an image or pipeline."""
    samples = held(what, count, tmp_path)
    check_steady(samples, passing=what == "service")
    assert slope(samples) <= most
