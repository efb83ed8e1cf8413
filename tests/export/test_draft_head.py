"""A drafter that scores only some codes, made from a bundle's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")

from lantern_rt import Pipeline, open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.cli.reduce_drafter import most_frequent
from lantern_rt.engines.ort.engine import OrtEngine
from lantern_rt.errors import BundleError
from lantern_rt.export.graph.draft_head import reduce_head
from lantern_rt.runtime.engine import Pass

CODES = 600


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reduced") / "bundle"
    options = ["--codes", str(CODES), "--images", "2", "--output", str(folder)]
    assert run_program(["reduce-drafter", "scenes", *options]) == 0
    return folder


def test_most_frequent_codes_come_in_order_and_ties_go_to_small_numbers() -> None:
    assert most_frequent(np.array([5, 5, 2, 7, 7, 7, 1]), 3, 9).tolist() == [1, 5, 7]
    assert most_frequent(np.array([3]), 3, 5).tolist() == [0, 1, 3]


def test_the_reduced_drafter_scores_its_codes_as_before_and_no_others(reduced: Path) -> None:
    rng, logits = np.random.default_rng(1), []
    tokens, hidden = rng.integers(1024, size=(2, 4)), rng.standard_normal((2, 4, 256), np.float32)
    for bundle in (open_bundle("scenes"), open_bundle(reduced)):
        spec = bundle.manifest.drafter
        assert spec is not None
        engine = OrtEngine(bundle.path("drafter"), spec)
        cache = engine.new_cache(2, 4)
        past_length = engine.next_past_length(cache, 4)
        attention_mask = np.zeros((2, 4, past_length + 4), bool)
        attention_mask[:, :, past_length:] = np.tri(4, dtype=bool)
        positions = np.broadcast_to(np.arange(4), (2, 4))
        logits.append(np.asarray(engine.run(Pass(positions, attention_mask, tokens, hidden=hidden), cache).logits))
    scored = logits[1] > -1e8
    assert (scored.sum(-1) == CODES).all()
    assert (scored == scored[0, 0]).all()
    np.testing.assert_allclose(logits[1][scored], logits[0][scored], rtol=1e-4, atol=1e-4)


def test_the_reduced_bundle_decodes_and_greedy_eagle_still_draws_what_greedy_ar_draws(reduced: Path) -> None:
    pipe = Pipeline.from_bundle(reduced)
    codes = [pipe("a red cone on sand", method=method, temperature=0).codes[0] for method in ("ar", "eagle")]
    np.testing.assert_array_equal(*codes)


def test_the_manifest_says_how_many_codes_are_scored(reduced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["inspect", str(reduced), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["manifest"]["drafter"]["head_codes"] == CODES
    assert (reduced / "drafter.onnx.data").stat().st_size < open_bundle("scenes").path("drafter.data").stat().st_size


def test_a_drafter_that_was_reduced_before_is_refused(reduced: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="found no head for 1024 codes; reduce the drafter of the original bundle"):
        reduce_head(reduced / "drafter.onnx", tmp_path / "again.onnx", np.arange(100), 1024)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--codes", "1024"], "codes: found 1024, expected a whole number 16 .. 1023"),
        (["--codes", "100", "--images", "1"], "images: found 1, expected a whole number 2 .. 10000"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    option: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(["reduce-drafter", "scenes", "--output", str(tmp_path / "new"), *option]) == 2
    assert capsys.readouterr().err.strip().endswith(message)
    assert not (tmp_path / "new").exists()
