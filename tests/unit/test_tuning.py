"""Tuning: likelihoods, budgets, stored choices and statistics, method auto, and the command."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from statistics_entries import CHEAP, DEAR, SITUATION, falling_rates, statistics_of
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline
from lantern_rt.cli.main import run_program
from lantern_rt.errors import BundleError, OutputError
from lantern_rt.methods import Ar, Auto, Eagle, LanternPlusPlus, MethodConfig, RowParallel, Sjd
from lantern_rt.planning.acceptance_statistics import (
    AcceptanceStatistics,
    Quality,
    WindowTokens,
    merge,
    read_statistics,
    weights_of,
)
from lantern_rt.planning.auto import known_statistics, predicted_choice
from lantern_rt.planning.budget import Budget, budget_of
from lantern_rt.planning.costs import HostCosts
from lantern_rt.planning.store import Choice, Tuning, read_tuning, write_tuning
from lantern_rt.tuning.measure import WINDOWS, exact_methods, ladders


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("tuning") / "tiny")


@pytest.fixture(scope="module")
def drafterless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("plain") / "tiny", "class", drafter=False, method="ar")


# ---------------------------------------------------------------- quality


def budget(quality: str) -> Budget:
    return budget_of(Auto(quality=quality))


def quality(images: int, tvd: float, ratio: float) -> Quality:
    return Quality(images=images, tvd_per_token=tvd, nll_ratio=ratio, nll_error=0.0)


def test_a_budget_bounds_total_variation_and_likelihood_to_both_sides() -> None:
    strict, balanced = budget("strict"), budget("balanced")
    exact, relaxed = Sjd(), Sjd(omega=1.5)
    assert strict.allows(exact, quality(4, 0.0, 1.1))  # exact by construction, whatever was measured
    assert not strict.allows(relaxed, quality(4, 0.0, 1.0))
    assert balanced.allows(relaxed, quality(4, 0.05, 1.015))
    assert balanced.allows(relaxed, quality(4, 0.05, 0.985))
    assert not balanced.allows(relaxed, quality(4, 0.07, 1.0))
    assert not balanced.allows(relaxed, quality(4, 0.05, 1.03))
    assert balanced.allows(relaxed, quality(4, 0.05, 1.03), quality(5, 0.05, 1.01))  # more images say otherwise
    assert not balanced.allows(relaxed, quality(4, 0.05, 0.97)), "tokens more likely than the target's own depart too"
    assert budget("tvd=0.10") == Budget(0.1, float("inf"))


@pytest.mark.parametrize("wrong", ["best", "TVD=2", "TVD", "TVD=0", ""])
def test_other_budgets_are_refused(wrong: str) -> None:
    with pytest.raises(ValidationError, match="expected strict, balanced, fast, or TVD=x with x between 0 and 1"):
        Auto(quality=wrong)


def test_methods_to_measure_are_what_the_bundle_can_run(folder: Path, drafterless: Path) -> None:
    full, plain = (Pipeline.from_bundle(one, threads=1).bundle.manifest for one in (folder, drafterless))
    assert exact_methods(full) == [Sjd(), Eagle()]
    assert exact_methods(plain) == [Sjd()]
    relaxed: list[Any] = [method for rung in ladders(full) for method in rung]
    assert {method.method for method in relaxed} == {"sjd", "lantern++", "rows"}
    assert max(getattr(method, "neighbors", None) or 0 for method in relaxed) <= full.neighbors
    assert {type(method) for rung in ladders(plain) for method in rung} == {Sjd, RowParallel}
    assert not any(method.exact for method in relaxed)


# ---------------------------------------------------------------- store and auto


def stored_choice(digest: str, method: Any, images: int = 1, **fields: Any) -> Tuning:
    situation = SITUATION.model_copy(update={"images": images})
    choice = Choice(method=method, date="2026-01-02", **fields)
    return Tuning(bundle_digest=digest, choices={str(situation): choice})


def test_what_is_stored_is_found_again_for_its_situation_only(own_cache: Path) -> None:
    tuning = stored_choice("d" * 64, Eagle(tree="chain-2"))
    path = write_tuning(tuning)
    assert own_cache in path.parents
    found = read_tuning("d" * 64)
    assert found == tuning
    assert found.choices[str(SITUATION)].method == Eagle(tree="chain-2")
    others = {"images": 6, "threads": 2, "greedy": True, "quality": "fast", "backend": "tensorrt"}
    for name, value in others.items():  # its passes cost something else, or something else may be given away
        assert str(SITUATION.model_copy(update={name: value})) not in found.choices
    path.write_text("{")
    assert read_tuning("d" * 64).choices == {}


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path / "file"))
    with pytest.raises(OutputError, match="set LANTERN_RT_CACHE to a folder that can"):
        write_tuning(Tuning(bundle_digest="d"))


def brings(entries: Any, weights: dict[str, str]) -> AcceptanceStatistics:
    return AcceptanceStatistics(format=4, weights=weights, entries=tuple(entries))


def test_a_prediction_needs_a_clear_gain_and_keeps_to_the_budget() -> None:
    exact = statistics_of(Eagle(), 0.5)
    bold = statistics_of(LanternPlusPlus(lambda_=5.0), 0.9, tvd_per_token=0.3)
    found = predicted_choice((exact, bold), CHEAP, "balanced")
    assert found is not None
    choice, why = found
    assert isinstance(choice.method, Eagle)
    assert why.startswith(f"auto: eagle:tree={choice.method.tree}, speed-up {choice.speed_up:.2f} by a short probe")
    loose = "TVD=0.4"
    bolder = predicted_choice((exact, bold), CHEAP, loose)
    assert bolder is not None
    assert bolder[0].method.parameters()["lambda"] == 5.0
    assert predicted_choice((exact, bold), DEAR, loose) is None
    assert predicted_choice((), CHEAP, loose) is None


def test_a_prediction_may_be_a_window_also_without_a_drafter() -> None:
    costs = HostCosts({2: 1.0, 4: 1.1, 8: 1.2}, None)
    entries = (statistics_of(Eagle(), 0.9), statistics_of(Sjd(), 0.8))
    found = predicted_choice(entries, costs, "strict")
    assert found is not None
    choice, why = found
    assert choice.method == Sjd(window=7)
    assert choice.speed_up == pytest.approx(2.6 / 1.2)
    assert why.startswith("auto: sjd:window=7, speed-up 2.17 by a short probe")


def test_statistics_are_those_of_most_images_and_only_of_the_same_weights(folder: Path) -> None:
    manifest = Pipeline.from_bundle(folder, threads=1).bundle.manifest
    window, tree = statistics_of(Sjd(), 0.5), statistics_of(Eagle(), 0.5)
    brought, nothing = brings((window, tree), weights_of(manifest)), Tuning(bundle_digest="d")
    here = Tuning(bundle_digest="d", statistics=(statistics_of(Sjd(), 0.7),))
    assert known_statistics(manifest, brought, here, False) == (statistics_of(Sjd(), 0.7), tree)
    assert known_statistics(manifest, brought, nothing, True) == ()
    other_drafter = brought.model_copy(update={"weights": weights_of(manifest) | {"drafter": "0" * 64}})
    assert other_drafter.fitting(manifest) == (window,)  # which needs no drafter
    stale = brought.model_copy(update={"weights": {"target": "0" * 64}})
    assert known_statistics(manifest, stale, nothing, False) == ()
    newer = (statistics_of(Eagle(tree="chain-9"), 0.5, images=9),)
    assert merge(newer, (tree, window)) == (*newer, window)  # another tree is no other method


def test_statistics_are_read_as_they_were_written(tmp_path: Path) -> None:
    relaxed = LanternPlusPlus(neighbors=None, lambda_=None, omega=1.5)
    found = brings((statistics_of(Sjd(omega=1.5), 0.3), statistics_of(relaxed, 0.6)), {"target": "a"})
    (tmp_path / "found.json").write_text(found.model_dump_json())
    again = read_statistics(tmp_path / "found.json")
    assert again == found
    assert [(one.window, one.tokens) for one in again.entries[0].windows] == [(3, 1.3), (7, 1.6)]
    np.testing.assert_allclose(again.entries[1].acceptance_rates, falling_rates(0.6))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("[]", "expected acceptance statistics; .*make the bundle again"),
        ("{", "expected acceptance statistics"),
        ('{"format": 1}', "of format 1, expected 4; measure them again"),
        ('{"images": 4, "entries": []}', "`format`: found nothing, expected a value"),
        ('{"format": 2, "weights": {}, "entries": []}', "of format 2, expected 4; measure them again"),
        ({"windows": []}, "method sjd needs `windows`"),
        ({"acceptance_rates": [[0.5]]}, "method sjd needs `windows`, and nothing else like it"),
        ({"windows": [{"window": 0, "tokens": 2.0}]}, "`entries.0.windows.0.window`: found 0, expected greater"),
        ({"tvd_per_token": -1.0}, "`entries.0.tvd_per_token`: found -1.0, expected greater than or equal to 0"),
        ({"surprise": 1}, "`entries.0.surprise`: unknown, expected it left out"),
        ({"method": {"method": "ar"}}, "method ar drafts nothing"),
    ],
)
def test_a_damaged_file_of_statistics_is_one_line(tmp_path: Path, change: str | dict[str, Any], line: str) -> None:
    text = change
    if isinstance(change, dict):
        whole = brings((statistics_of(Sjd(), 0.5),), {}).model_dump(mode="json")
        whole["entries"][0] |= change
        text = json.dumps(whole)
    assert isinstance(text, str)
    (tmp_path / "found.json").write_text(text)
    with pytest.raises(BundleError, match=line):
        read_statistics(tmp_path / "found.json")


def test_auto_takes_the_stored_choice_and_says_why(folder: Path) -> None:
    pipe = Pipeline.from_bundle(folder, threads=1)
    stored = LanternPlusPlus(tree="tree-2-10", neighbors=4, lambda_=2.0)
    write_tuning(stored_choice(pipe.bundle.digest, stored, speed_up=1.7))
    tuned = pipe("red sphere", quality="balanced", seed=3)
    assert tuned.settings.choice is not None
    assert tuned.settings.choice.startswith("auto: lantern++:")
    assert tuned.settings.choice.endswith("speed-up 1.70 here when tuned on 2026-01-02")
    named = pipe("red sphere", method="lantern++", tree="tree-2-10", neighbors=4, lambda_=2.0, seed=3)
    np.testing.assert_array_equal(tuned.codes[0], named.codes[0])
    assert tuned.settings == named.settings


def test_a_stored_method_that_adds_no_neighbours_stays_without_them(folder: Path) -> None:
    pipe = Pipeline.from_bundle(folder, threads=1)
    stored = LanternPlusPlus(tree="chain-2", neighbors=None, lambda_=None, omega=1.5, anneal=0.5)
    write_tuning(stored_choice(pipe.bundle.digest, stored, speed_up=1.7))
    assert pipe("red sphere", quality="balanced").settings.method == stored


@pytest.mark.usefixtures("even_clock")
def test_auto_probes_the_host_where_the_bundle_has_statistics(folder: Path) -> None:
    pipe = Pipeline.from_bundle(folder, threads=1)
    weights = weights_of(pipe.bundle.manifest)
    bold = statistics_of(Sjd(neighbors=4, lambda_=1.5), tvd_per_token=0.02)
    pipe.chooser._brought = brings((bold,), weights)
    result = pipe(["red sphere", "a cube"], quality="fast")
    assert result.settings.choice is not None
    assert "short probe" in result.settings.choice
    probes = read_tuning(pipe.bundle.digest).probes
    assert list(probes) == ["onnxruntime-cpu, 1 threads, 4 rows"]  # two images, guided
    assert all(seconds > 0 for costs in probes.values() for seconds in costs.target.values())
    again = Pipeline.from_bundle(folder, threads=1)  # another process would find the same
    again.chooser._brought = pipe.chooser._brought
    assert again(["red sphere", "a cube"], quality="fast").settings.choice == result.settings.choice
    assert read_tuning(pipe.bundle.digest).probes == probes


def test_auto_is_the_default_where_nothing_else_is_asked(folder: Path) -> None:
    pipe = Pipeline.from_bundle(folder, threads=1)

    def method(**options: Any) -> MethodConfig:
        return pipe("red sphere", **options).settings.method

    assert method().exact
    tuning = stored_choice(pipe.bundle.digest, Sjd(window=3), speed_up=2.0)
    strict = {str(SITUATION.model_copy(update={"quality": "strict"})): one for one in tuning.choices.values()}
    write_tuning(tuning.model_copy(update={"choices": strict}))
    chosen = pipe("red sphere").settings
    assert chosen.method == Sjd(window=3)
    assert chosen.choice == "auto: sjd:window=3, speed-up 2.00 here when tuned on 2026-01-02"
    assert method(method="ar") == Ar()
    assert method(tree="chain-2").method == "lantern"  # the bundle's, for parameters without a method
    assert method(temperature=0.5) == Sjd(window=3)


@pytest.mark.usefixtures("even_clock")
def test_a_bundle_may_bring_statistics_of_this_format_or_an_older_one(tmp_path: Path) -> None:
    folder, role = make_tiny_bundle(tmp_path / "tiny"), "acceptance_statistics"
    weights = weights_of(Pipeline.from_bundle(folder, threads=1).bundle.manifest)
    bold = Sjd(omega=1.5, anneal=0.5)
    entries = (statistics_of(bold, 0.9, tvd_per_token=0.02, windows=(WindowTokens(window=3, tokens=3.9),)),)
    add_file(folder, role, brings(entries, weights).model_dump_json())
    settings = Pipeline.from_bundle(folder, threads=1)("red sphere", quality="fast").settings
    assert settings.method == bold.model_copy(update={"window": 3})
    assert "by a short probe" in str(settings.choice)
    add_file(folder, role, '{"format": 2}')
    assert Pipeline.from_bundle(folder, threads=1).chooser._brought is None
    add_file(folder, role, '{"format": 4}')
    with pytest.raises(BundleError, match="expected acceptance statistics"):
        Pipeline.from_bundle(folder, threads=1)


def add_file(folder: Path, role: str, text: str) -> None:
    manifest = json.loads((folder / "bundle.json").read_text())
    (folder / f"{role}.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    manifest["files"][role] = {"path": f"{role}.json", "sha256": digest, "bytes": len(text)}
    (folder / "bundle.json").write_text(json.dumps(manifest))


def test_without_statistics_a_budget_is_not_used(folder: Path) -> None:
    pipe = Pipeline.from_bundle(folder, threads=1)
    chosen = pipe("red sphere", quality="balanced")
    assert chosen.settings.method.exact
    np.testing.assert_array_equal(chosen.codes[0], pipe("red sphere", method="ar").codes[0])


# ---------------------------------------------------------------- the command


def written(statistics: Path) -> list[str]:
    return ["--acceptance-statistics", str(statistics)]


@pytest.mark.usefixtures("even_clock")
def test_tune_measures_chooses_and_stores(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("red sphere\n\ngreen cube on sand\n")
    arguments = ["tune", str(folder), "--minutes", "0.01", "--threads", "1", "--prompts", str(prompts)]
    statistics = tmp_path / "statistics.json"
    plot = tmp_path / "costs.png"
    assert (
        run_program(
            [
                *arguments,
                "--quality",
                "TVD=0.5",
                "--json",
                "--acceptance-statistics",
                str(statistics),
                "--plot",
                str(plot),
            ]
        )
        == 0
    )
    assert plot.read_bytes().startswith(b"\x89PNG")
    report = json.loads(capsys.readouterr().out)
    pipe = Pipeline.from_bundle(folder, threads=1)
    stored = read_tuning(pipe.bundle.digest).choices[str(SITUATION.model_copy(update={"quality": "TVD=0.5"}))]
    assert stored.model_dump() == report["choice"]
    assert Path(report["path"]).is_file()
    found = read_statistics(statistics)
    assert {entry.method.method for entry in found.entries} >= {"eagle", "sjd"}
    exact = next(entry for entry in found.entries if entry.method == Sjd())
    assert [one.window for one in exact.windows] == list(WINDOWS)
    assert exact.windows[-1].tokens > 1
    assert found.fitting(pipe.bundle.manifest) == found.entries
    assert (
        pipe("red sphere", method="auto", quality="TVD=0.5").settings.method.method
        == report["choice"]["method"]["method"]
    )
    assert run_program(arguments) == 0
    assert "chosen: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        ([], "bundle tiny has no prompts to draw; give --prompts FILE"),
        (["--minutes", "0"], "minutes: found 0, expected a number above 0, up to 1440"),
        (["--images", "0"], "images: found 0, expected a whole number 1 .. 64"),
        (["--quality", "nice"], "quality: found 'nice', expected strict, balanced, fast, or TVD=x"),
        (["--prompts", "nowhere.txt"], "nowhere.txt: cannot be read"),
    ],
)
def test_wrong_use_of_tune_is_one_line(
    folder: Path, extra: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(["tune", str(folder), *extra]) == 2
    assert line in capsys.readouterr().err


def tune_shortly(bundle: Path, statistics: Path) -> list[str]:
    options = {"--minutes": 0.01, "--threads": 1, "--acceptance-statistics": statistics}
    return ["tune", str(bundle), *(str(part) for option in options.items() for part in option)]


@pytest.mark.usefixtures("even_clock")
def test_a_bundle_without_a_drafter_is_tuned_too(
    drafterless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    statistics = tmp_path / "statistics.json"
    arguments = [*tune_shortly(drafterless, statistics), "--json"]
    assert run_program([*arguments, "--quality", "strict"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["drafter_ms"] is None
    assert report["choice"]["method"]["method"] in ("ar", "sjd")
    assert [entry.method for entry in read_statistics(statistics).entries] == [Sjd()]
    pipe = Pipeline.from_bundle(drafterless, threads=1)
    assert pipe(class_ids=3, quality="strict").settings.method.method == report["choice"]["method"]["method"]
    four = pipe(class_ids=[1, 2, 3, 4], quality="fast").settings  # not tuned for four, and no relaxed method is known
    assert "while drawing" in str(four.choice)


@pytest.mark.usefixtures("even_clock")
def test_tuning_greedily_adds_to_the_statistics_of_sampling(
    drafterless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    statistics = tmp_path / "statistics.json"
    arguments = tune_shortly(drafterless, statistics)
    assert run_program([*arguments, "--quality", "strict"]) == 0
    assert run_program([*arguments, "--quality", "strict", "--temperature", "0"]) == 0
    assert [entry.greedy for entry in read_statistics(statistics).entries] == [True, False]
    statistics.write_text("mine")
    capsys.readouterr()
    assert run_program(arguments) == 2
    assert "found a file, expected none" in capsys.readouterr().err
    assert statistics.read_text() == "mine"
