"""Presets of a bundle, which give the method of each quality: how they are chosen, written, used and checked."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from refusals import catch_error
from tiny_bundle import make_heads_bundle, make_tiny_bundle

from lantern_rt import BundleError, Pipeline, open_bundle
from lantern_rt.bundle.manifest import Manifest
from lantern_rt.bundle.rewrite import write_presets
from lantern_rt.cli.main import run_program
from lantern_rt.compare.presets import choose_presets, list_candidate_methods
from lantern_rt.methods import RowParallel, SpeculativeJacobi
from lantern_rt.requests import resolve_settings


def make_figure(low: float, high: float) -> dict[str, Any]:
    return {"difference_to_ar": {"value": (low + high) / 2, "low": low, "high": high}}


def make_relaxed_entry(
    method: str, speed: float, excess: tuple[float, float], agreement: tuple[float, float] | None = None
) -> Any:
    figures = {"excess_nll": make_figure(*excess)}
    if agreement is not None:
        figures["agreement"] = make_figure(*agreement)
    tokens = 9.0 - speed  # not used: the choice depends on seconds alone
    times = {"seconds": 100 / speed, "tokens_per_forward_pass": tokens}
    return {"method": method, "exact": False, "figures": figures, **times}


def make_exact_entry(method: str, seconds: float) -> Any:
    return {"method": method, "exact": True, "seconds": seconds, "tokens_per_forward_pass": 9.0, "figures": None}


def choose_methods(folder: Path, *entries: Any) -> dict[str, str]:
    report = {"methods": [make_exact_entry("ar", 1.0), *entries], "images_per_method": 50}
    presets = choose_presets(report, open_bundle(folder).manifest)
    return {quality: str(preset.method).split(":")[0] for quality, preset in presets.items()}


def test_presets_are_the_fastest_methods_within_the_limits(words_bundle: Path) -> None:
    within_balanced = make_relaxed_entry("sjd:lambda=2", 2.0, (0.0, 0.03))
    within_fast = make_relaxed_entry("rows", 4.0, (0.05, 0.11))
    above_limits = make_relaxed_entry("lantern++", 5.0, (0.05, 0.13))
    below_limits = make_relaxed_entry("lantern", 6.0, (-0.2, -0.1))  # too probable tokens are a difference, too
    almost_balanced = make_relaxed_entry("rows", 4.0, (0.03, 0.041))
    slow = make_relaxed_entry("rows", 1.5, (0.0, 0.01))
    lower_agreement = make_relaxed_entry("rows", 4.0, (0.0, 0.01), (-0.025, 0.01))
    too_low_agreement = make_relaxed_entry("rows", 4.0, (0.0, 0.01), (-0.031, 0.01))
    for entries, chosen in (
        ((within_balanced, within_fast, above_limits, below_limits), {"balanced": "sjd", "fast": "rows"}),
        ((within_balanced, almost_balanced), {"balanced": "sjd", "fast": "rows"}),
        ((within_balanced, slow), {"balanced": "sjd", "fast": "sjd"}),
        ((within_fast,), {"fast": "rows"}),
        ((above_limits,), {}),
        ((lower_agreement,), {"fast": "rows"}),
        ((too_low_agreement,), {}),
    ):
        assert choose_methods(words_bundle, *entries) == chosen


def test_preset_strict_is_the_fastest_exact_method_of_the_report(words_bundle: Path) -> None:
    seconds = {"sjd:window=3": 30.0, "sjd:window=11": 20.0, "strict": 10.0}
    exact_entries = [make_exact_entry(*item) for item in seconds.items()]
    report = {"methods": [make_exact_entry("ar", 1.0), *exact_entries], "images_per_method": 50}
    presets = choose_presets(report, open_bundle(words_bundle).manifest)
    assert {quality: str(preset.method) for quality, preset in presets.items()} == {"strict": "sjd:window=11"}
    assert presets["strict"].figures is not None
    assert presets["strict"].figures.excess_nll == 0


def test_preset_candidates_are_relaxed_methods_without_drafter(words_bundle: Path, tmp_path: Path) -> None:
    pipeline = Pipeline.from_bundle(words_bundle, threads=1)
    candidates = list_candidate_methods(pipeline.bundle.manifest)
    assert {name.split(":")[0] for name in candidates} == {"sjd", "rows"}
    for name in candidates:
        method = pipeline("red cube", method=name).settings.method
        assert not method.exact
        assert not method.requirements.drafters
    manifest_without_drafter = open_bundle(make_tiny_bundle(tmp_path / "bare", drafter=False)).manifest
    assert {name.split(":")[0] for name in list_candidate_methods(manifest_without_drafter)} == {"rows"}


def test_eval_writes_presets_and_changes_the_bundles_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_tiny_bundle(tmp_path / "tiny")
    before = open_bundle(folder)
    (tmp_path / "prompts.txt").write_text("red cube\ngreen cube on sand\nred sphere\n")
    no_limit = SimpleNamespace(max_excess_nll=9, max_agreement_loss=9)
    monkeypatch.setattr("lantern_rt.compare.presets.LIMITS", {"balanced": no_limit, "fast": no_limit})
    options = ["--threads", "1", "--prompts", "prompts.txt", "--method", "rows:window=2", "--write-presets"]
    assert run_program(["eval", str(folder), *options]) == 0
    text = capsys.readouterr().out
    after = open_bundle(folder)
    assert f"was {before.digest[:12]}, is {after.digest[:12]}" in text
    assert str(after.manifest.presets["fast"].method) == "rows:window=2:drafts=0"
    assert after.manifest.presets["fast"].figures.images == 3
    unchanged = {"presets": before.manifest.presets, "format_version": before.manifest.format_version}
    assert after.manifest.model_copy(update=unchanged) == before.manifest
    by_quality = Pipeline.from_bundle(folder, threads=1)("red cube", quality="balanced")
    by_method = Pipeline.from_bundle(folder, threads=1)("red cube", method="rows:window=2")
    assert by_quality.codes[0].tolist() == by_method.codes[0].tolist()
    assert catch_error(BundleError, write_presets, before, {}).field == str(folder / "bundle.json")
    strict, balanced, fast = after.manifest.presets.values()
    new_preset = balanced.model_copy(update={"method": RowParallel(window=3)})
    presets = write_presets(after, {"balanced": new_preset}).manifest.presets
    assert presets == {"strict": strict, "balanced": new_preset, "fast": fast}
    assert open_bundle(folder).manifest.presets["balanced"] == new_preset


FIGURES = {"tokens_per_pass": 2.0, "excess_nll": 0.0, "images": 1, "date": "2026-11-25"}


def set_fast_preset(folder: Path, method: dict[str, Any]) -> Path:
    """Set `method` as the preset `fast` in the manifest of a bundle; return the folder of the bundle."""
    path = folder / "bundle.json"
    presets = {"fast": {"method": method, "figures": FIGURES}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"presets": presets}))
    return folder


@pytest.mark.parametrize("quality", ["strict", "fast"])
def test_a_bundle_with_heads_supports_every_quality(tmp_path: Path, quality: Any) -> None:
    folder = make_heads_bundle(tmp_path / "tiny").folder
    # Without neighbours this method is lossless.
    set_fast_preset(folder, {"method": "lantern++", "neighbors": None, "lambda": None})
    with Pipeline.from_bundle(folder, threads=1) as pipeline:
        pipeline.warm_up()
        result = pipeline("red cube", quality=quality)
        assert result.codes[0].tolist() == pipeline("red cube", method="ar").codes[0].tolist()


@pytest.mark.parametrize(
    ("has_heads", "method"),
    [
        (True, {"method": "eagle", "tree": "chain-2", "drafter": "eagle"}),
        (False, {"method": "eagle", "tree": "chain-2", "drafter": "heads"}),
        (False, {"method": "lantern++", "tree": "chain-2", "neighbors": 9, "lambda": 2.0}),
        (True, {"method": "sjd", "neighbors": 1, "delta": 0.1}),
    ],
)
def test_an_unsupported_preset_is_rejected_by_name(tmp_path: Path, has_heads: bool, method: dict[str, Any]) -> None:
    folder = make_heads_bundle(tmp_path / "tiny").folder if has_heads else make_tiny_bundle(tmp_path / "tiny")
    error = catch_error(BundleError, open_bundle, set_fast_preset(folder, method))
    assert error.problem.startswith(f"preset fast, {method['method']}:")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("precision", ["fp32", "int8", "int8-weights"])
def test_the_default_method_is_exact_sjd_in_every_precision(words_bundle: Path, dtype: str, precision: str) -> None:
    manifest = open_bundle(words_bundle).manifest
    target = manifest.target.model_copy(update={"dtype": dtype, "precision": precision})
    settings = resolve_settings(manifest.model_copy(update={"target": target}), {})
    assert (settings.method, settings.quality, settings.method.exact) == (SpeculativeJacobi(window=7), "strict", True)


def test_strict_presets_must_be_exact(words_bundle: Path) -> None:
    manifest = open_bundle(words_bundle).manifest
    relaxed_method = {"method": "rows", "window": 2}
    exact_method = {"method": "sjd", "window": 3}
    for presets, fault in (
        ({"strict": {"method": relaxed_method}}, "is not exact"),
        ({"strict": {"method": exact_method, "devices": relaxed_method}}, "is not exact"),
        ({"fast": {"method": relaxed_method, "devices": exact_method}}, "would generate different images there"),
    ):
        with pytest.raises(ValidationError, match=fault):
            Manifest.model_validate(manifest.model_dump() | {"presets": presets})
