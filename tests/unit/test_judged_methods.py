"""Budgets that decide by what an evaluation found of images, and drafts of rows that are planned."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evaluation_graphs import make_agreement
from pydantic import ValidationError
from statistics_entries import CHEAP, statistics_of
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline
from lantern_rt.cli.main import run_program
from lantern_rt.methods import Auto, LanternPlusPlus, RowParallel, Sjd
from lantern_rt.planning.acceptance_statistics import Estimate, Fronts, Judged, Quality, merge, read_statistics
from lantern_rt.planning.auto import predicted_choice
from lantern_rt.planning.budget import Budget, budget_of
from lantern_rt.planning.costs import HostCosts
from lantern_rt.planning.store import Choice, Tuning, read_tuning, write_tuning
from lantern_rt.planning.tree_search import best_plan
from lantern_rt.runtime.grid import Raster, row_batch_sizes
from lantern_rt.tuning.measure import ROW_DRAFTS

METHODS = "ar,sjd:window=3:neighbors=4:lambda=9,sjd:window=6:neighbors=4:lambda=9,rows:window=2,lantern++,sjd"


def estimate(value: float, error: float = 0.005) -> Estimate:
    return Estimate(value=value, low=value - error, high=value + error)


def judged(excess: float, agreement: float | None = 0.0, **fields: Any) -> Judged:
    given = {"images": 400, "window": 15, "frechet_within": True, **fields}
    return Judged(excess_nll=estimate(excess), agreement=None if agreement is None else estimate(agreement), **given)


def quality(found: Judged | None, tvd: float = 0.3, images: int = 24) -> Quality:
    return Quality(images=images, tvd_per_token=tvd, nll_ratio=1.5, nll_error=0.01, judged=found)


def budget(name: str) -> Budget:
    return budget_of(Auto(quality=name))


# ---------------------------------------------------------------- budgets


@pytest.mark.parametrize("method", [Sjd(omega=2.0), RowParallel(window=4)])
def test_where_images_were_judged_their_intervals_decide_and_nothing_else(method: Sjd | RowParallel) -> None:
    balanced, fast = budget("balanced"), budget("fast")
    assert balanced.allows(method, quality(judged(0.034)))
    assert balanced.allows(method, quality(judged(-0.034)))
    for excess in (0.036, -0.036):  # an end of the interval is beyond 0.04, to either side
        assert not balanced.allows(method, quality(judged(excess)))
        assert fast.allows(method, quality(judged(excess)))
    assert balanced.allows(method, quality(judged(0.0, agreement=-0.014)))
    assert balanced.allows(method, quality(judged(0.0, agreement=0.5)))
    assert not balanced.allows(method, quality(judged(0.0, agreement=-0.016)))
    assert fast.allows(method, quality(judged(0.0, agreement=-0.024)))
    assert not fast.allows(method, quality(judged(0.0, agreement=-0.026)))
    assert not fast.allows(method, quality(judged(0.0, frechet_within=False)))
    assert fast.allows(method, quality(judged(0.0, agreement=None)))
    assert fast.allows(method, quality(judged(0.0, frechet_within=None)))
    assert not fast.allows(method, quality(judged(0.2), tvd=0.0)), "a small total variation does not outweigh it"
    assert not budget("strict").allows(method, quality(judged(0.0)))
    assert not budget("TVD=0.2").allows(method, quality(judged(0.0)))


def test_images_of_most_count_whoever_brings_them() -> None:
    good, bad = quality(judged(0.0, images=500), images=3), quality(judged(0.2), images=100)
    assert budget("fast").allows(Sjd(omega=2.0), bad, good)
    assert budget("fast").allows(Sjd(omega=2.0), quality(None, images=900), good)


def test_a_judgement_holds_for_windows_up_to_its_own() -> None:
    found = quality(judged(0.0, window=7))
    assert budget("fast").allows(Sjd(omega=2.0, window=7), found)
    assert not budget("fast").allows(Sjd(omega=2.0, window=8), found), "total variation decides again"
    assert budget("fast").allows(
        Sjd(omega=2.0, window=8), found.model_copy(update={"tvd_per_token": 0.1, "nll_ratio": 1})
    )


def test_what_nobody_looked_at_is_not_judged() -> None:
    with pytest.raises(ValidationError, match="nothing has looked at the images"):
        judged(0.0, agreement=None, frechet_within=None)


def test_statistics_that_were_judged_outlast_those_of_more_images() -> None:
    old = statistics_of(Sjd(omega=2.0), images=4, judged=judged(0.0))
    new = statistics_of(Sjd(omega=2.0), images=90)
    assert merge((new,), (old,)) == merge((old,), (new,)) == (old,)
    again = old.model_copy(update={"images": 5})
    assert merge((again,), (old,)) == (again,)


def test_a_prediction_says_what_is_given_away() -> None:
    bold = statistics_of(Sjd(omega=2.0), 0.9, tvd_per_token=0.3, nll_ratio=0.9, judged=judged(0.0213, 0.011))
    found = predicted_choice((bold,), CHEAP, "balanced")
    assert found is not None
    assert found[0].method == Sjd(omega=2.0, window=7)
    assert "; +0.021 nats a token, +1.1 points of prompt agreement against ar in 400 images;" in found[1]
    narrow = bold.model_copy(update={"judged": judged(0.0, window=3)})
    assert predicted_choice((narrow,), CHEAP, "balanced") is None, "its best window was not judged"
    unjudged = bold.model_copy(update={"judged": None})
    assert predicted_choice((unjudged,), CHEAP, "balanced") is None
    found = predicted_choice((unjudged,), CHEAP, "TVD=0.4")
    assert found is not None
    assert "; tokens 10.0% more likely than ar's, total variation 0.300 a token;" in found[1]


# ---------------------------------------------------------------- rows


def test_the_drafts_of_rows_are_those_whose_tokens_outweigh_their_nodes() -> None:
    given = [Fronts(drafts=drafts, tokens=100, passes={2 + 2 * drafts: 50 - 10 * drafts}) for drafts in range(4)]
    found = statistics_of(RowParallel(window=2), fronts=tuple(given), acceptance_rates=())
    plan = best_plan(found, CHEAP)
    assert (plan.drafting, plan.tokens, plan.nodes) == ({"drafts": 3}, 5, 8)
    dear = HostCosts({2: 1.0, 4: 1.1, 8: 3.0}, None)
    assert best_plan(found, dear).drafting == {"drafts": 1}
    assert best_plan(found, CHEAP, most_nodes=5).drafting == {"drafts": 1}


# ---------------------------------------------------------------- an evaluation


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("judged") / "tiny")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("red sphere\ngreen cube on sand\n")
    return file


@pytest.fixture(scope="module")
def evaluation(bundle: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    graph = str(make_agreement(folder / "words.onnx"))
    options = ["--prompts", str(prompts), "--threads", "1", "--agreement", graph, "--output", str(folder / "found")]
    assert run_program(["eval", str(bundle), "--methods", METHODS, *options]) == 0
    return folder / "found" / "eval.json"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("even_clock")
def test_tune_takes_an_evaluation_and_a_bundle_may_bring_it_along(
    bundle: Path, prompts: Path, evaluation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written, options = tmp_path / "statistics.json", ["--minutes", "0.02", "--threads", "1", "--quality", "TVD=0.9"]
    files = ["--prompts", str(prompts), "--evaluation", str(evaluation), "--acceptance-statistics", str(written)]
    assert run_program(["tune", str(bundle), *options, *files, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["untried"] == [] or "there was time for all"
    entries = {entry.method: entry for entry in read_statistics(written).entries}
    relaxed = entries[Sjd(neighbors=4, lambda_=9.0)]  # on no ladder: it is tried as it was evaluated
    figures = {
        str(one["settings"].get("window")): one["figures"] for one in json.loads(evaluation.read_text())["methods"]
    }
    assert relaxed.judged is not None
    assert (relaxed.judged.images, relaxed.judged.window, relaxed.judged.frechet_within) == (2, 6, None)
    assert relaxed.judged.excess_nll.model_dump() == figures["6"]["excess_nll"]["difference_to_ar"]
    assert relaxed.judged.agreement is not None
    assert relaxed.judged.agreement.model_dump() == figures["6"]["agreement"]["difference_to_ar"]
    assert all(entry.judged is None for method, entry in entries.items() if isinstance(method, LanternPlusPlus))


@pytest.mark.usefixtures("even_clock")
def test_tune_measures_the_passes_of_rows_with_drafts(bundle: Path, prompts: Path, evaluation: Path) -> None:
    options = ["--minutes", "0.2", "--threads", "1", "--quality", "fast", "--prompts", str(prompts)]
    given = json.loads(evaluation.read_text())
    within = {"value": 0.0, "low": 0.0, "high": 0.0}
    for one in given["methods"]:
        one["figures"] |= {
            name: {"difference_to_ar": within, "above_ar_interval": False} for name in ("excess_nll", "agreement")
        }
    mended = evaluation.with_name("mended.json")
    mended.write_text(json.dumps(given))
    assert run_program(["tune", str(bundle), *options, "--evaluation", str(mended)]) == 0
    pipe = Pipeline.from_bundle(bundle, threads=1)
    known = {entry.method: entry for entry in read_tuning(pipe.bundle.digest).statistics}
    fronts = known[RowParallel(window=2)].fronts
    assert [one.drafts for one in fronts] == [0, *ROW_DRAFTS]
    codes = pipe.bundle.manifest.codes_per_image
    assert fronts[0].passes == Counter(row_batch_sizes(Raster(codes, pipe.bundle.manifest.grid_columns), 2))
    assert all(one.tokens % (codes - 1) == 0 for one in fronts), "only whole images count"
    assert all(one.tokens_per_pass >= fronts[0].tokens_per_pass for one in fronts)
    assert max(fronts[-1].passes) > max(fronts[0].passes)


def test_a_stored_choice_says_what_it_gives_away(bundle: Path) -> None:
    pipe = Pipeline.from_bundle(bundle, threads=1)
    method = Sjd(omega=2.0, window=3)
    situation = str(pipe.situation(1, None, "fast"))
    known = (statistics_of(Sjd(omega=2.0), judged=judged(0.1, -0.02)),)
    choices = {situation: Choice(method=method, speed_up=2.0, date="2026-01-02")}
    write_tuning(Tuning(bundle_digest=pipe.bundle.digest, choices=choices, statistics=known))
    chosen = pipe("red sphere", quality="fast").settings
    assert chosen.method == method.model_copy(update={"anneal": 1.0})
    assert str(chosen.choice).endswith(
        "2026-01-02; +0.100 nats a token, -2.0 points of prompt agreement against ar in 400 images"
    )


def with_digest(given: dict[str, Any]) -> None:
    given["bundle_digest"] = "0" * 64


def with_settings(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(given: dict[str, Any]) -> None:
        for one in given["methods"]:
            one["settings"][name] = value

    return change


def without_figures(given: dict[str, Any]) -> None:
    for one in given["methods"]:
        del one["figures"]["agreement"]


def of_nothing(given: dict[str, Any]) -> None:
    del given["methods"][1]["figures"]["excess_nll"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (with_digest, "found images of bundle '000000000000', expected"),
        (with_settings("cfg_scale", 5.0), "found no relaxed sjd or rows, drawn with this sampling"),
        (with_settings("window", 1000), "expected an evaluation of this bundle, found window: "),
        (with_settings("method", ["sjd"]), "found no relaxed sjd or rows"),
        (without_figures, "found no relaxed sjd or rows"),
        (of_nothing, "expected an evaluation of this bundle; `methods.1.figures.excess_nll`: "),
    ],
)
def test_a_wrong_evaluation_is_one_line(
    bundle: Path,
    prompts: Path,
    evaluation: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], None],
    line: str,
) -> None:
    given = json.loads(evaluation.read_text())
    change(given)
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(given))
    assert run_program(["tune", str(bundle), "--prompts", str(prompts), "--evaluation", str(wrong)]) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1
