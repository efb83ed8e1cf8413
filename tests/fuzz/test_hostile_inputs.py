"""Seeded hostile inputs of every kind: one line or a picture, never a traceback, a hang, or a control character."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import KINDS, Originals, check

FAST = {"manifests": 80, "bundles": 50, "engines": 30, "caches": 30, "trees": 40, "prompts": 25, "tokenizers": 35}
FAST |= {"evaluations": 80}
SLOW = {**dict.fromkeys(("manifests", "bundles"), 2500), **dict.fromkeys(("engines", "caches", "trees"), 1200)}
SLOW |= {"prompts": 400, "tokenizers": 600, "evaluations": 2000, "checkpoints": 400}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Originals:
    return Originals(tmp_path_factory.mktemp("originals"))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("bundles", 2074),
        ("bundles", 2243),
        ("bundles", 20082),
        ("bundles", 20250),
        ("bundles", 100228),
        ("engines", 10143),
    ],
)
def test_what_was_answered_badly_once_is_answered_cleanly(kind: str, seed: int, originals: Originals) -> None:
    """Shapes that are no text, lines of ONNX Runtime's own, outputs of other shapes, endless weights, no target."""
    check(kind, seed, originals)


@pytest.mark.filterwarnings("default")  # as in the program
@pytest.mark.parametrize("kind", FAST)
def test_a_few_hostile_inputs_of_every_kind_are_answered_cleanly(kind: str, originals: Originals) -> None:
    for seed in range(FAST[kind]):
        check(kind, seed, originals)


@pytest.mark.parametrize("kind", ["manifests", "bundles", "caches", "trees"])
def test_the_program_itself_answers_them_cleanly(kind: str, originals: Originals) -> None:
    check(kind, 90_000, originals, program=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_hostile_inputs_are_answered_cleanly(kind: str) -> None:
    """In a process of its own: what kills it is a failure, too. One in fifty goes to the program itself."""
    script, own = Path(__file__).with_name("cases.py"), {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for first, last, program in ((100_000, 100_000 + SLOW[kind], False), (200_000, 200_000 + SLOW[kind] // 50, True)):
        command = [sys.executable, str(script), kind, str(first), str(last), *(["--program"] if program else [])]
        done = subprocess.run(command, capture_output=True, text=True, env=own)
        assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-500:]}"


def test_there_are_ten_thousand_of_them() -> None:
    assert sum(SLOW.values()) >= 10_000
    assert sum(FAST.values()) >= 290
    assert SLOW.keys() == KINDS.keys()
