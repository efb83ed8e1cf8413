"""Test damaged and hostile inputs: the program succeeds or prints one error line, without a traceback or a hang."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import KINDS, ValidInputs, check_case

# Number of inputs of each kind in the fast and in the slow test.
FAST_COUNTS = {"manifests": 60, "bundles": 60, "references": 20, "pictures": 60, "shards": 15, "engines": 20}
FAST_COUNTS |= {"trees": 30, "prompts": 15, "tokenizers": 25}
SLOW_COUNTS = {"manifests": 2500, "bundles": 2500, "references": 300, "pictures": 1000, "shards": 500, "engines": 1000}
SLOW_COUNTS |= {"trees": 700, "prompts": 250, "tokenizers": 300, "checkpoints": 300}


@pytest.fixture(scope="module")
def valid_inputs(c2i_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> ValidInputs:
    return ValidInputs(tmp_path_factory.mktemp("originals"), c2i_bundle)


@pytest.mark.filterwarnings("default")  # the default of the program, which does not turn warnings into errors
@pytest.mark.parametrize("kind", FAST_COUNTS)
def test_the_program_handles_a_few_hostile_inputs_of_each_kind(
    kind: str, valid_inputs: ValidInputs, capfd: pytest.CaptureFixture[str]
) -> None:
    for seed in range(FAST_COUNTS[kind]):
        check_case(kind, seed, valid_inputs, capfd)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", KINDS)
def test_the_program_handles_thousands_of_hostile_inputs(
    kind: str, valid_inputs: ValidInputs, capfd: pytest.CaptureFixture[str]
) -> None:
    for seed in range(100_000, 100_000 + SLOW_COUNTS[kind]):
        check_case(kind, seed, valid_inputs, capfd)
