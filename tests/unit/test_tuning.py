"""Tuning: likelihoods, budgets, stored choices and rates, method auto, and the command."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_bundle import make_tiny_bundle
from toy_engine import make_model, make_prompt, next_distribution

from lantern_rt import Pipeline, RequestError
from lantern_rt.cli.main import run_program
from lantern_rt.errors import BundleError, OutputError
from lantern_rt.planning.auto import known_rates, predicted_choice
from lantern_rt.planning.candidates import WINDOWS, Measured, Quality, exact_candidates, ladders, parse_budget
from lantern_rt.planning.costs import HostCosts, PassCost
from lantern_rt.planning.rates import DEPTHS, RANKS
from lantern_rt.planning.rates_file import Rates, RatesEntry, WindowCodes, as_entries, merge, read_rates, weights_of
from lantern_rt.planning.records import Candidate
from lantern_rt.planning.store import Choice, Entry, Situation, Tuning, cache_folder, read_tuning, write_tuning
from lantern_rt.runtime.likelihood import likelihood, negative_log_likelihood
from lantern_rt.runtime.sampling import Sampling

SITUATION = Situation(backend="onnxruntime-cpu", threads=1, images=1, greedy=False, quality="balanced")
CHEAP = HostCosts(PassCost((2, 64), (1.0, 1.0)), PassCost((2, 64), (0.01, 0.01)), 0.0, 0.0)  # nodes are free
DEAR = HostCosts(PassCost((2, 3, 64), (1.0, 2.0, 63.0)), PassCost((2, 64), (1.0, 1.0)), 0.0, 0.0)


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


def falling_rates(first: float) -> np.ndarray:
    rates = np.zeros((DEPTHS, RANKS))
    rates[:5, :4] = first * 0.6 ** np.arange(4)
    return rates


# ---------------------------------------------------------------- quality


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(cfg_scale=2.5, temperature=0.8)])
def test_the_likelihood_is_that_of_the_targets_own_distributions(sampling: Sampling) -> None:
    model, prompt = make_model(vocabulary=5, codes=7), make_prompt(3, prefix=4, padding=1)
    codes = np.array([0, 3, 1, 1, 4, 2, 0])
    exact = [
        -np.log(next_distribution(model, prompt, codes[:i].tolist(), sampling)[code]) for i, code in enumerate(codes)
    ]
    assert negative_log_likelihood(model, prompt, codes, sampling) == pytest.approx(np.mean(exact), abs=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(cfg_scale=2.5, temperature=0.8)])
def test_the_entropy_is_what_the_likelihood_is_to_be_expected_given_the_codes_before(sampling: Sampling) -> None:
    model, prompt = make_model(vocabulary=5, codes=3), make_prompt(3)
    expected = entropy = 0.0
    for codes in itertools.product(range(5), repeat=3):
        chance = 1.0
        for i, code in enumerate(codes):
            chance *= next_distribution(model, prompt, list(codes[:i]), sampling)[code]
        found = likelihood(model, prompt, np.array(codes), sampling)
        expected, entropy = expected + chance * found.nats, entropy + chance * found.entropy
    assert entropy == pytest.approx(expected, abs=1e-5)
    assert entropy > 0.3


def test_budgets_are_named_and_others_refused() -> None:
    strict, balanced = parse_budget("strict"), parse_budget("balanced")
    exact, relaxed = Candidate(method="sjd"), Candidate(method="sjd", omega=1.5)
    assert strict.allows(exact, Quality(4, 0.0, 1.1))  # by chance: its distribution is the target's
    assert not strict.allows(relaxed, Quality(4, 0.0, 1.0))
    assert balanced.allows(relaxed, Quality(4, 0.05, 1.015))
    assert balanced.allows(relaxed, Quality(4, 0.05, 0.985))
    assert not balanced.allows(relaxed, Quality(4, 0.07, 1.0))
    assert not balanced.allows(relaxed, Quality(4, 0.05, 1.03))
    assert balanced.allows(relaxed, Quality(4, 0.05, 1.03), Quality(5, 0.05, 1.01))  # more images say otherwise
    assert not balanced.allows(
        relaxed, Quality(4, 0.05, 0.97)
    )  # likelier codes than the target's own are a departure too
    for wrong in ("best", "TVD=2", "TVD", ""):
        with pytest.raises(RequestError, match="expected strict, balanced, fast, or TVD=x with x between 0 and 1"):
            parse_budget(wrong)


def test_candidates_are_what_the_bundle_can_run(folder: Path, drafterless: Path) -> None:
    full, plain = (Pipeline.from_bundle(one, threads=1).bundle.manifest for one in (folder, drafterless))
    assert {c.method for c in exact_candidates(full, greedy=False)} == {"sjd", "eagle"}
    assert [c.children for c in exact_candidates(full, greedy=True)] == [None, None]  # greedily they always are
    assert exact_candidates(plain, greedy=False) == [Candidate(method="sjd")]
    relaxed = [c for rung in ladders(full) for c in rung]
    assert {c.method for c in relaxed} == {"sjd", "lantern", "lantern++"}
    assert max(c.neighbors or 0 for c in relaxed) <= full.neighbors
    assert {(c.method, c.neighbors) for rung in ladders(plain) for c in rung} == {("sjd", None)}
    assert not any(c.exact for c in relaxed)


# ---------------------------------------------------------------- store and auto


def entry(method: Any, images: int = 1, **fields: Any) -> Entry:
    situation = SITUATION.model_copy(update={"images": images})
    return Entry(situation=situation, choice=Choice(method=method, **fields), version="0", date="2026-01-02")


def test_what_is_stored_is_found_again_for_its_situation_only(own_cache: Path) -> None:
    tuning = Tuning(bundle_digest="d" * 64).with_entry(entry("ar")).with_entry(entry("eagle", tree="chain-2"))
    path = write_tuning(tuning.with_entry(entry("ar", images=8)))
    assert own_cache in path.parents
    found = read_tuning("d" * 64)
    assert len(found.entries) == 2  # the second entry took the place of the first
    assert found.find(SITUATION).choice.tree == "chain-2"  # type: ignore[union-attr]
    assert found.find(SITUATION.model_copy(update={"images": 6})) is None  # its passes cost something else
    assert found.find(SITUATION.model_copy(update={"threads": 2})) is None
    path.write_text("{")
    assert read_tuning("d" * 64).entries == ()


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path / "file"))
    with pytest.raises(OutputError, match="set LANTERN_RT_CACHE to a folder that can"):
        write_tuning(Tuning(bundle_digest="d"))


def test_the_cache_follows_the_systems_custom(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LANTERN_RT_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lantern-rt"


def rates_entry(method: Any, first: float, **fields: Any) -> RatesEntry:
    quality = {"tvd_per_code": 0.0, "nll_ratio": 1.0, "nll_error": 0.0, "images": 4, "greedy": False}
    own = {name: fields.pop(name) for name in tuple(fields) if name in Candidate.model_fields}
    rates = {"rates": tuple(map(tuple, falling_rates(first)))}
    if method == "sjd":
        rates = {"windows": (WindowCodes(window=3, codes=1 + first), WindowCodes(window=7, codes=1 + 2 * first))}
    return RatesEntry(candidate=Candidate(method=method, **own), **(quality | rates | fields))


def test_a_prediction_needs_a_clear_gain_and_keeps_to_the_budget() -> None:
    exact = rates_entry("eagle", 0.5)
    bold = rates_entry("lantern++", 0.9, neighbors=10, lambda_=5.0, tvd_per_code=0.3)
    choice, why = predicted_choice((exact, bold), CHEAP, SITUATION)
    assert choice.method == "eagle"
    assert why.startswith(f"auto: eagle {choice.tree}, {choice.speed_against_ar:.2f} x ar by a short probe")
    loose = SITUATION.model_copy(update={"quality": "TVD=0.4"})
    assert predicted_choice((exact, bold), CHEAP, loose)[0].lambda_ == 5.0
    assert predicted_choice((exact, bold), DEAR, loose)[0].method == "ar"
    greedy = SITUATION.model_copy(update={"greedy": True})
    assert predicted_choice((exact, bold), CHEAP, greedy)[0].method == "ar"


def test_a_prediction_may_be_a_window_also_without_a_drafter() -> None:
    costs = HostCosts(PassCost((2, 4, 8), (1.0, 1.1, 1.2)), None, 0.0, 0.0)
    entries = (rates_entry("eagle", 0.9), rates_entry("sjd", 0.8))
    choice, why = predicted_choice(entries, costs, SITUATION.model_copy(update={"quality": "strict"}))
    assert choice.parameters() == {"method": "sjd", "window": 7}
    assert choice.speed_against_ar == pytest.approx(2.6 / 1.2)
    assert why.startswith("auto: sjd window 7, 2.17 x ar by a short probe")


def test_rates_are_those_found_here_then_those_brought_and_only_of_the_same_weights(folder: Path) -> None:
    manifest = Pipeline.from_bundle(folder, threads=1).bundle.manifest
    brought = Rates(
        format=1, weights=weights_of(manifest), entries=(rates_entry("sjd", 0.5), rates_entry("eagle", 0.5))
    )
    tuning = Tuning(bundle_digest="d").with_rates((rates_entry("sjd", 0.7),))
    assert known_rates(manifest, brought, tuning, False)[0] == (rates_entry("sjd", 0.7), rates_entry("eagle", 0.5))
    assert known_rates(manifest, brought, Tuning(bundle_digest="d"), True) == (
        (),
        "auto: ar, as the rates known of bundle tiny are not of greedy decoding; `lantern-rt tune` measures them",
    )
    other_drafter = brought.model_copy(update={"weights": weights_of(manifest) | {"drafter": "0" * 64}})
    assert other_drafter.fitting(manifest) == (rates_entry("sjd", 0.5),)  # which needs no drafter
    stale = brought.model_copy(update={"weights": {"target": "0" * 64}})
    assert "were measured with other weights" in known_rates(manifest, stale, Tuning(bundle_digest="d"), False)[1]


def test_what_is_measured_is_stored_as_it_is(tmp_path: Path) -> None:
    measured = [
        Measured(Candidate(method="sjd", omega=1.5), 0.02, 1.01, float("inf"), 1, windows={3: 2.125, 7: 2.5}),
        Measured(Candidate(method="eagle"), 0.0, 1.0, 0.0, 4, rates=falling_rates(0.6)),
    ]
    rates = Rates(format=1, weights={"target": "a"}, entries=as_entries(measured, greedy=False))
    (tmp_path / "rates.json").write_text(rates.model_dump_json(exclude_none=True))
    again = read_rates(tmp_path / "rates.json")
    assert again == rates
    assert again.entries[0].window_codes() == {3: 2.125, 7: 2.5}
    assert again.entries[0].nll_error == 1.0  # one image says nothing about likelihood
    np.testing.assert_allclose(again.entries[1].tree_rates(), measured[1].rates, atol=1e-4)
    newer = as_entries([Measured(Candidate(method="eagle"), 0.0, 1.0, 0.0, 9, rates=falling_rates(0.5))], greedy=False)
    assert [entry.images for entry in merge(newer, again.entries)] == [9, 1]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("[]", r"found no rates in it .*make the bundle again"),
        ('{"images": 4, "entries": []}', r"found no rates in it \(format: Field required\)"),
        ('{"format": 2, "weights": {}, "entries": []}', r"found rates of format 2, expected 1; measure them again"),
        ({"windows": [], "rates": []}, r"method sjd needs `windows`"),
        ({"rates": [[0.5]]}, r"method sjd needs `windows`, and nothing else like it"),
        ({"windows": [{"window": 0, "codes": 2.0}]}, r"entries.0.windows.0.window: Input should be greater"),
        ({"tvd_per_code": -1.0}, r"entries.0.tvd_per_code: Input should be greater than or equal to 0"),
        ({"surprise": 1}, r"entries.0.surprise: Extra inputs are not permitted"),
    ],
)
def test_a_damaged_rates_file_is_one_line(tmp_path: Path, change: str | dict[str, Any], line: str) -> None:
    text = change
    if isinstance(change, dict):
        whole = Rates(format=1, weights={}, entries=(rates_entry("sjd", 0.5),)).model_dump(mode="json")
        whole["entries"][0] |= change
        text = json.dumps(whole)
    assert isinstance(text, str)
    (tmp_path / "rates.json").write_text(text)
    with pytest.raises(BundleError, match=line):
        read_rates(tmp_path / "rates.json")


def test_auto_takes_the_stored_choice_and_says_why(folder: Path) -> None:
    pipe = Pipeline.from_bundle(folder, threads=1)
    plain = pipe("red sphere", method="auto", seed=3)
    assert plain.settings.method == "ar"
    assert plain.settings.choice == "auto: ar, as bundle tiny brings no rates; `lantern-rt tune` measures them"
    stored = entry("lantern++", tree="tree-2-10", neighbors=4, lambda_=2.0, speed_against_ar=1.7)
    write_tuning(Tuning(bundle_digest=pipe.bundle.digest).with_entry(stored))
    tuned = pipe("red sphere", method="auto", seed=3)
    assert tuned.settings.choice == (
        "auto: lantern++ tree-2-10 neighbors 4 lambda 2, 1.70 x ar here when tuned on 2026-01-02"
    )
    named = pipe("red sphere", method="lantern++", tree="tree-2-10", neighbors=4, lambda_=2.0, seed=3)
    np.testing.assert_array_equal(tuned.codes[0], named.codes[0])
    assert tuned.settings == named.settings


def test_auto_probes_the_host_where_the_bundle_has_rates(folder: Path) -> None:
    pipe = Pipeline.from_bundle(folder, threads=1)
    weights = weights_of(pipe.bundle.manifest)
    pipe._chooser._rates = Rates(format=1, weights=weights, entries=(rates_entry("eagle", 0.9),))
    result = pipe(["red sphere", "a cube"], method="auto")
    assert result.settings.choice is not None
    assert "short probe" in result.settings.choice
    (probe,) = read_tuning(pipe.bundle.digest).probes
    assert probe.rows == 4  # two images, guided
    assert probe.costs().target.seconds[0] > 0
    again = Pipeline.from_bundle(folder, threads=1)  # another process would find the same
    again._chooser._rates = pipe._chooser._rates
    assert again(["red sphere", "a cube"], method="auto").settings.choice == result.settings.choice
    assert read_tuning(pipe.bundle.digest).probes == (probe,)


@pytest.mark.parametrize("name", ["tree", "neighbors", "delta", "lambda_", "residual"])
def test_auto_refuses_what_it_chooses_itself(folder: Path, name: str) -> None:
    value = {"tree": "chain-2", "neighbors": 3, "delta": 0.1, "lambda_": 2.0, "residual": "borrowed"}[name]
    with pytest.raises(RequestError, match=f"{name.rstrip('_')}: method auto chooses it; leave"):
        Pipeline.from_bundle(folder, threads=1)("red sphere", method="auto", **{name: value})  # type: ignore[arg-type]


def test_auto_is_the_default_once_something_is_known_and_nothing_else_is_asked(folder: Path) -> None:
    pipe = Pipeline.from_bundle(folder, threads=1)
    assert pipe("red sphere").settings.method == "lantern"  # the bundle's
    write_tuning(Tuning(bundle_digest=pipe.bundle.digest).with_entry(entry("sjd", window=3, speed_against_ar=2.0)))
    chosen = pipe("red sphere").settings
    assert (chosen.method, chosen.window) == ("sjd", 3)
    assert chosen.choice == "auto: sjd window 3, 2.00 x ar here when tuned on 2026-01-02"
    assert pipe("red sphere", method="ar").settings.method == "ar"
    assert pipe("red sphere", tree="chain-2").settings.method == "lantern"
    assert pipe("red sphere", temperature=0.5).settings.method == "sjd"


def test_a_bundle_that_brings_rates_is_decoded_by_them_without_being_asked(tmp_path: Path) -> None:
    folder = make_tiny_bundle(tmp_path / "tiny")
    weights = weights_of(Pipeline.from_bundle(folder, threads=1).bundle.manifest)
    entries = (rates_entry("sjd", 0.9, windows=(WindowCodes(window=3, codes=3.9),)),)
    add_file(folder, "rates", Rates(format=1, weights=weights, entries=entries).model_dump_json())
    settings = Pipeline.from_bundle(folder, threads=1)("red sphere").settings
    assert settings.choice is not None
    assert "by a short probe" in settings.choice or "a short probe of this host promises no gain" in settings.choice
    add_file(folder, "rates", '{"format": 9}')
    with pytest.raises(BundleError, match="found rates of format 9, expected 1"):
        Pipeline.from_bundle(folder, threads=1)


def add_file(folder: Path, role: str, text: str) -> None:
    manifest = json.loads((folder / "bundle.json").read_text())
    (folder / f"{role}.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    manifest["files"][role] = {"path": f"{role}.json", "sha256": digest, "bytes": len(text)}
    (folder / "bundle.json").write_text(json.dumps(manifest))


def test_quality_alone_asks_for_auto(folder: Path) -> None:
    chosen = Pipeline.from_bundle(folder, threads=1)("red sphere", quality="strict").settings
    assert chosen.choice == "auto: ar, as bundle tiny brings no rates; `lantern-rt tune` measures them"


def test_quality_belongs_to_auto(folder: Path) -> None:
    with pytest.raises(RequestError, match="quality: method ar does not choose by it; leave quality out"):
        Pipeline.from_bundle(folder, threads=1)("red sphere", method="ar", quality="fast")


# ---------------------------------------------------------------- the command


def test_tune_measures_chooses_and_stores(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("red sphere\n\ngreen cube on sand\n")
    arguments = ["tune", str(folder), "--minutes", "0.01", "--threads", "1", "--prompts", str(prompts)]
    rates = tmp_path / "rates.json"
    plot = tmp_path / "costs.png"
    assert run_program([*arguments, "--quality", "TVD=0.5", "--json", "--rates", str(rates), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    report = json.loads(capsys.readouterr().out)
    pipe = Pipeline.from_bundle(folder, threads=1)
    stored = read_tuning(pipe.bundle.digest).find(SITUATION.model_copy(update={"quality": "TVD=0.5"}))
    assert stored is not None
    assert stored.choice.model_dump() == report["choice"]
    assert Path(report["path"]).is_file()
    found = read_rates(rates)
    assert {entry.candidate.method for entry in found.entries} >= {"eagle", "sjd"}
    exact = next(entry for entry in found.entries if entry.candidate == Candidate(method="sjd"))
    assert [one.window for one in exact.windows] == list(WINDOWS)
    assert exact.windows[-1].codes > 1
    assert found.fitting(pipe.bundle.manifest) == found.entries
    assert pipe("red sphere", method="auto", quality="TVD=0.5").settings.method == report["choice"]["method"]
    assert run_program(arguments) == 0
    assert "chosen: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        ([], "bundle tiny has no prompts to measure with; give --prompts FILE"),
        (["--minutes", "0"], "minutes: found 0, expected a number above 0, up to 1440"),
        (["--images", "0"], "images: found 0, expected a whole number 1 .. 64"),
        (["--quality", "nice"], "quality: found 'nice', expected strict, balanced, fast, or TVD=x"),
        (["--prompts", "nowhere.txt"], "prompts nowhere.txt: cannot be read"),
    ],
)
def test_wrong_use_of_tune_is_one_line(
    folder: Path, extra: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(["tune", str(folder), *extra]) == 2
    assert line in capsys.readouterr().err


def test_a_bundle_without_a_drafter_is_tuned_too(
    drafterless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = tmp_path / "rates.json"
    arguments = ["tune", str(drafterless), "--minutes", "0.01", "--threads", "1", "--rates", str(rates), "--json"]
    assert run_program([*arguments, "--quality", "strict"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["drafter_ms"] is None
    assert report["choice"]["method"] in ("ar", "sjd")
    assert [entry.candidate for entry in read_rates(rates).entries] == [Candidate(method="sjd")]
    pipe = Pipeline.from_bundle(drafterless, threads=1)
    assert pipe(class_ids=3, quality="strict").settings.method == report["choice"]["method"]
    four = pipe(class_ids=[1, 2, 3, 4], quality="strict").settings  # not tuned for four, but the rates are known
    assert four.choice is not None
    assert "a short probe" in four.choice


def test_tuning_greedily_adds_to_the_rates_of_sampling(
    drafterless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = tmp_path / "rates.json"
    arguments = ["tune", str(drafterless), "--minutes", "0.01", "--threads", "1", "--rates", str(rates)]
    assert run_program([*arguments, "--quality", "strict"]) == 0
    assert run_program([*arguments, "--quality", "strict", "--temperature", "0"]) == 0
    assert [entry.greedy for entry in read_rates(rates).entries] == [True, False]
    rates.write_text("mine")
    capsys.readouterr()
    assert run_program(arguments) == 2
    assert "found a file, expected none" in capsys.readouterr().err
    assert rates.read_text() == "mine"
