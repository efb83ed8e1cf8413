"""Seeded hostile inputs of every kind: one line or an image, never a traceback, a hang, or a control character."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import KINDS, Originals, check

# Number of inputs of each kind in the fast and in the slow test.
FAST = {"manifests": 60, "bundles": 60, "references": 20, "pictures": 60, "shards": 15, "engines": 20}
FAST |= {"trees": 30, "prompts": 15, "tokenizers": 25}
SLOW = {"manifests": 2500, "bundles": 2500, "references": 300, "pictures": 1000, "shards": 500, "engines": 1000}
SLOW |= {"trees": 700, "prompts": 250, "tokenizers": 300, "checkpoints": 300}


@pytest.fixture(scope="module")
def originals(c2i_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Originals:
    return Originals(tmp_path_factory.mktemp("originals"), c2i_bundle)


@pytest.mark.filterwarnings("default")  # as in the program
@pytest.mark.parametrize("kind", FAST)
def test_a_few_hostile_inputs_of_every_kind_are_handled(
    kind: str, originals: Originals, capfd: pytest.CaptureFixture[str]
) -> None:
    for seed in range(FAST[kind]):
        check(kind, seed, originals, capfd)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_hostile_inputs_are_handled(
    kind: str, originals: Originals, capfd: pytest.CaptureFixture[str]
) -> None:
    for seed in range(100_000, 100_000 + SLOW[kind]):
        check(kind, seed, originals, capfd)
