"""Measuring on a host whose clock is scripted: what disturbs it is believed by nothing, and time is kept to."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from statistics_entries import CHEAP, SITUATION, statistics_of
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline
from lantern_rt.cli.main import run_program
from lantern_rt.compare.turns import Subjects
from lantern_rt.engines.ort.engine import OrtEngine
from lantern_rt.methods import Ar, Eagle, MethodConfig, Sjd
from lantern_rt.planning import auto
from lantern_rt.planning.acceptance_statistics import AcceptanceStatistics, weights_of
from lantern_rt.planning.auto import predicted_choice
from lantern_rt.planning.costs import HostCosts, measure_costs, rising_medians, with_overhead
from lantern_rt.planning.intervals import FEWEST, evened, median_interval, spread, time_in_rounds
from lantern_rt.planning.store import Choice, Tuning, read_tuning, write_tuning
from lantern_rt.planning.tree_search import Plan
from lantern_rt.requests import resolve_settings
from lantern_rt.tuning.measure import LEAST_PASSES, Measurement
from lantern_rt.tuning.tune import Finalist, choose, compare

TARGET = {2: 6e-3, 4: 6.6e-3, 8: 7.5e-3, 16: 8.8e-3, 32: 12e-3, 64: 20e-3}  # seconds of a pass by nodes
DRAFTER = {nodes: seconds / 10 for nodes, seconds in TARGET.items()}
Cost = Callable[[int, bool], float]


@dataclass
class Host:
    """Only passes take time: `cost(nodes, drafts)` seconds. began: when each pass did. now: seconds."""

    cost: Cost = field(default=lambda nodes, drafts: quiet(nodes, drafts))
    now: float = 1000.0
    began: list[float] = field(default_factory=list)

    def work(self, seconds: float) -> None:
        self.began.append(self.now)
        self.now += seconds


def quiet(nodes: int, drafts: bool) -> float:
    return float(np.interp(nodes, list(TARGET), list(TARGET.values()))) / (10 if drafts else 1)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host, real = Host(), OrtEngine.run

    def run(engine: OrtEngine, batch: Any, cache: Any) -> Any:
        host.work(host.cost(batch.positions.shape[1], batch.hidden is not None))
        return real(engine, batch, cache)

    monkeypatch.setattr(OrtEngine, "run", run)
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: host.now)
    return host


def disturbed(times: int, by: float, of_nodes: int | None = None) -> Cost:
    """A quiet host, but for the passes `times` and `times + 1` over `of_nodes` nodes, which take `by` seconds."""
    seen = iter(range(10**9))

    def cost(nodes: int, drafts: bool) -> float:
        hit = of_nodes in (None, nodes) and not drafts and times <= next(seen) <= times + 1
        return by if hit else quiet(nodes, drafts)

    return cost


def wild() -> Cost:
    rng = np.random.default_rng(3)
    return lambda nodes, drafts: quiet(nodes, drafts) * float(rng.choice([1, 3, 8, 20]))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_bundle(tmp_path_factory.mktemp("busy") / "tiny")
    (folder.parent / "prompts.txt").write_text("red sphere\ngreen cube on sand\n")
    return folder


# ---------------------------------------------------------------- intervals


def test_the_interval_encloses_the_median_in_nine_of_ten_cases_by_counting() -> None:
    for count in range(FEWEST, 200):
        low, high = median_interval(range(count))
        missed = sum(math.comb(count, i) for i in range(int(low) + 1)) / 2**count  # to either side
        assert high == count - 1 - low
        assert 1 - 2 * missed >= 0.9
    assert median_interval([1, 1, 1, 1]) == (0, math.inf)
    assert spread([1, 1, 1, 1]) == math.inf
    assert spread([0.9, 1, 1, 1, 1.2]) == pytest.approx(0.2)
    assert spread([1, 1, 1, 1, 1, 1, 1, 5.91]) == 0  # one of eight is not believed


def test_rounds_last_until_every_median_is_known_or_the_time_is_out(host: Host) -> None:
    assert [len(own) for own in time_in_rounds([lambda: host.work(0.01), lambda: host.work(0.03)], 1.0)] == [13, 13]
    assert [len(own) for own in time_in_rounds([lambda: host.work(7.0)], 1.0, untimed=2)] == [FEWEST]
    rng = np.random.default_rng(0)
    (wide,) = time_in_rounds([lambda: host.work(float(rng.uniform(0.1, 0.9)))], 10.0)
    assert 10 < sum(wide) < 11
    took = iter([0.06, 0.03, 0.02, 0.02] * FEWEST)  # a turn; the first runs find cold caches
    assert time_in_rounds([lambda: host.work(next(took))], 0.0, turn=0.12) == [pytest.approx([0.02] * 2 * FEWEST)]
    cut = time_in_rounds([lambda: host.work(2.0), lambda: host.work(1.0)], 60.0, host.now + 5)
    assert [len(own) for own in cut] == [2, 2]  # the last pass began at five seconds


def test_a_pace_that_all_jobs_share_is_taken_off_and_a_disturbance_of_one_stays_its_own(host: Host) -> None:
    rng = np.random.default_rng(1)
    paces = rng.uniform(0.7, 1.4, 21)
    turns = [[[seconds * pace, seconds * pace] for pace in paces] for seconds in (1.0, 2.0, 5.0)]
    turns[1][3] = [60.0]
    one, two, five = evened(turns)
    assert (len(one), len(two), len(five)) == (42, 41, 42)
    for took, seconds in ((one, 1.0), (two, 2.0), (five, 5.0)):
        middle = seconds * float(np.median(paces))
        assert np.median(took) == pytest.approx(middle)
        assert sum(abs(each / middle - 1) > 1e-6 for each in took) == (took is two), "only the disturbed one differs"
        assert spread([float(one) for turn in turns[0] for one in turn]) > 0.03 > spread(took)
    assert evened(turns[:2])[0] == [each for turn in turns[0] for each in turn], "of two, none is the host"
    assert evened([[[1.0]], [[2.0]], []]) == [[1.0], [2.0], []]

    drifting = iter(range(10**9))

    def job(seconds: float) -> Callable[[], None]:
        return lambda: host.work(seconds * (1.3 if next(drifting) // 30 % 2 else 1.0))

    times = time_in_rounds([job(0.01), job(0.02), job(0.04)], 3.0)
    assert max(map(spread, times)) < 0.03
    assert [float(np.median(own) / np.median(times[0])) for own in times] == pytest.approx([1, 2, 4])


# ---------------------------------------------------------------- costs


def test_medians_rise_with_nodes_and_a_disturbed_size_lifts_no_other() -> None:
    noisy = {2: [40.0, 40, 40, 6, 6], 4: [6.5] * 5, 8: [7.0] * 5, 16: [8.0] * 5}
    assert rising_medians(noisy) == {2: 6.5, 4: 6.5, 8: 7.0, 16: 8.0}
    assert rising_medians({4: [6.6], 8: [50.5], 16: [8.8], 32: [60.0]}) == {4: 6.6, 8: 29.65, 16: 29.65, 32: 60.0}


@pytest.mark.parametrize("nodes", [2, 8, 64])
def test_a_disturbance_of_one_size_changes_no_cost(host: Host, folder: Path, nodes: int) -> None:
    pipeline = Pipeline.from_bundle(folder, threads=1)
    for first in (1, 4):
        host.cost = disturbed(first, 50.5e-3, nodes)
        costs = measure_costs(pipeline.bundle.manifest, *pipeline.decoders(), 2, 2.0)
        assert costs.steady
        assert (costs.target, costs.drafter) == (pytest.approx(TARGET), pytest.approx(DRAFTER))


@pytest.mark.parametrize("unknown", [(8,), (32, 64), (2,), (4, 8, 16, 32, 64)])
def test_sizes_that_stay_unknown_are_left_out(host: Host, folder: Path, unknown: tuple[int, ...]) -> None:
    pipeline, rng = Pipeline.from_bundle(folder, threads=1), np.random.default_rng(2)
    host.cost = lambda n, drafts: quiet(n, drafts) * (float(rng.choice([1, 2, 3])) if n in unknown else 1)
    costs = measure_costs(pipeline.bundle.manifest, *pipeline.decoders(), 2, 2.0)
    assert costs.steady == (2 not in unknown and len(unknown) < 5)
    if costs.steady:
        assert costs.target == pytest.approx({nodes: s for nodes, s in TARGET.items() if nodes not in unknown})


def test_a_host_that_never_settles_is_not_steady(host: Host, folder: Path) -> None:
    pipeline, host.cost = Pipeline.from_bundle(folder, threads=1), wild()
    costs = measure_costs(pipeline.bundle.manifest, *pipeline.decoders(), 2, 2.0)
    assert not costs.steady
    assert list(costs.target.values()) == sorted(costs.target.values())


@pytest.mark.parametrize(("slower", "sizes"), [(1, 6), (6, 4), (1000, 2)])
def test_slow_models_are_timed_at_fewer_sizes(host: Host, folder: Path, slower: float, sizes: int) -> None:
    pipeline = Pipeline.from_bundle(folder, threads=1)
    host.cost = lambda nodes, drafts: slower * quiet(nodes, drafts)
    costs = measure_costs(pipeline.bundle.manifest, *pipeline.decoders(), 2, 1.0)
    assert costs.steady
    assert costs.target == pytest.approx({nodes: slower * TARGET[nodes] for nodes in list(TARGET)[:sizes]})


def test_no_pass_begins_past_the_deadline_but_the_first_ones(host: Host, folder: Path) -> None:
    pipeline, host.cost = Pipeline.from_bundle(folder, threads=1), lambda nodes, drafts: 5.0
    deadline = host.now + 42
    costs = measure_costs(pipeline.bundle.manifest, *pipeline.decoders(), 2, 6.0, deadline)
    assert host.began[-1] <= deadline
    assert not costs.steady
    assert (costs.target, costs.drafter) == ({2: 5.0, 4: 5.0}, {2: 5.0, 4: 5.0})
    passes = len(host.began)
    assert measure_costs(pipeline.bundle.manifest, *pipeline.decoders(), 2, 6.0, deadline).target == {2: 5.0}
    assert len(host.began) == passes + 4  # for each engine one to fill its cache and one to time


def test_work_outside_the_engines_is_the_median_of_steps(host: Host) -> None:
    costs = HostCosts({2: 6e-3, 8: 7e-3}, {2: 1e-3})
    usual = {"ar": 8e-3, "sjd": 9e-3 + 7e-4, "eagle": 8.5e-3 + 4 * 1.2e-3}

    def decode(method: MethodConfig) -> Iterator[object]:
        for step in range(20):  # then the image is done, and drawn again
            host.work(0.5 if step in (0, 5, 6) else usual[method.method])
            yield step

    def plain() -> None:
        host.work(6e-3)

    found = with_overhead(costs, plain, decode, 10.0)
    assert found.steady
    assert (found.step, found.redraft) == (pytest.approx(2e-3), pytest.approx(1e-4))
    assert found.level == pytest.approx(2e-4)
    assert with_overhead(costs, plain, decode, 10.0, host.now) == replace(costs, steady=False)


# ---------------------------------------------------------------- auto


def test_auto_predicts_nothing_where_the_host_is_too_busy_and_stores_no_probe(
    host: Host, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = statistics_of(Eagle(), 0.9)
    assert predicted_choice((entry,), CHEAP, "strict") is not None
    assert predicted_choice((entry,), replace(CHEAP, steady=False), "strict") is None
    pipe, host.cost = Pipeline.from_bundle(folder, threads=1), wild()
    pipe.chooser._brought = AcceptanceStatistics(format=4, weights=weights_of(pipe.bundle.manifest), entries=(entry,))
    assert pipe("red sphere", quality="fast").settings.method.exact
    assert read_tuning(pipe.bundle.digest).probes == {}
    probes: list[object] = []
    monkeypatch.setattr(auto, "measure_costs", lambda *asked: probes.append(asked))
    assert "while drawing" in str(pipe("red sphere", quality="fast").settings.choice)
    assert not probes  # a process does not probe a busy host again


# ---------------------------------------------------------------- turns


def finalist(speed_ups: list[float], step_costs: list[float] | None = None) -> Finalist:
    choice = Choice(method=Sjd(window=7), speed_up=float(np.median(speed_ups)))
    return Finalist(statistics_of(Sjd()), choice, 3, 0.0, speed_ups, step_costs or [1.2] * len(speed_ups), {})


@pytest.mark.parametrize(
    ("found", "sure", "doubtful"),
    [
        (finalist([1.5, 1.6, 1.7, 1.8, 1.9]), True, False),
        (finalist([5.91, 1.0, 1.0, 1.0, 1.0], [0.2, 1.2, 1.2, 1.2, 1.2]), False, True),
        (finalist([5.91, *[1.0] * 7], [0.2, *[1.2] * 7]), False, False),  # more turns say what it was
        (finalist([5.91, 5.91, 5.91, 5.91]), False, True),  # too few, whatever they say
        (finalist([5.91, 1.1, 3.0, 1.2, 2.0], [0.2, 1.1, 0.4, 1.0, 0.6]), False, True),
        (finalist([1.5, 1.6, 1.7, 1.8, 0.9]), False, True),  # perhaps; pictures differ
        (
            finalist([0.5, 0.4, 0.9, 0.6, 0.2], [3.0, 4.0, 2.0, 3.0, 9.0]),
            False,
            False,
        ),  # a busy host, but surely slower
    ],
)
def test_a_finalist_is_chosen_only_if_all_of_its_interval_is_faster(
    found: Finalist, sure: bool, doubtful: bool
) -> None:
    assert (found.surely_faster, found.doubtful) == (sure, doubtful)


def measurement(folder: Path, quality: str = "strict") -> Measurement:
    pipeline = Pipeline.from_bundle(folder, threads=1)
    settings = resolve_settings(pipeline.bundle.manifest, {"method": "auto", "quality": quality})
    subjects = Subjects("prompts", ["red sphere", "green cube on sand"])
    return Measurement(pipeline, subjects, 1, settings, lambda line: None)


@pytest.mark.parametrize("nodes", [2, 8])
def test_one_disturbed_turn_gives_neither_a_choice_nor_a_speed_up(host: Host, folder: Path, nodes: int) -> None:
    measured = measurement(folder)
    dear = {2: 6e-3, 8: 60e-3}
    measured.costs = HostCosts(dear, None)
    entry, plan = statistics_of(Sjd()), Plan((), 1.6, 60e-3, 7)
    calls = iter(range(10**9))

    def cost(count: int, drafts: bool) -> float:
        return (
            50.0 if count == nodes and next(calls) == 40 else float(np.interp(count, list(dear), list(dear.values())))
        )

    host.cost = cost
    (found,) = compare(measured, [(entry, plan)], host.now + 120)
    wrong = [n for n, ratio in enumerate(found.step_costs) if not 5 < ratio < 15]
    assert len(wrong) == 1, "one turn was disturbed"
    assert found.choice.speed_up < 0.5
    assert choose([found], measured.budget, {}).method == Ar()


def test_as_many_finalists_are_compared_as_there_is_time_for(host: Host, folder: Path) -> None:
    measured = measurement(folder)
    measured.costs = HostCosts(TARGET, None)
    entry, plans = statistics_of(Sjd()), [Plan((), 2.0, 1e-2, window) for window in (3, 7, 15)]
    for seconds, expected in ((20.0, 3), (6.6, 2), (0.2, 0)):
        end = host.now + seconds
        found = compare(measured, [(entry, plan) for plan in plans], end)
        assert len(found) == expected
        assert all(len(one.speed_ups) >= FEWEST for one in found)
        assert host.now <= end + max(TARGET.values())


def test_what_is_exact_is_measured_by_parts_of_images_and_what_is_relaxed_by_whole_ones(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_bundle(tmp_path / "large", grid=16)
    for quality, seconds in (("strict", 10.0), ("TVD=0.5", 20.0)):
        measured, scored = measurement(folder, quality), list[int]()
        real = measured.pipeline.likelihoods

        def record(codes: Any, *given: Any, real: Any = real, scored: list[int] = scored, **options: Any) -> Any:
            scored.extend(map(len, codes))
            return real(codes, *given, **options)

        monkeypatch.setattr(measured.pipeline, "likelihoods", record)
        end = host.now + seconds
        measured.run(seconds)
        assert host.now < end + 7 * max(TARGET.values())  # a pass, and the scores of what was drawn
        assert [entry.method for entry in measured.entries[:2]] == [Sjd(), Eagle()]
        plain, *drafted = scored
        assert all(codes > LEAST_PASSES for codes in scored)
        if quality == "strict":
            assert max(drafted[:6]) < 256
            assert measured.untried == []
        else:
            assert (plain, {*drafted[7:]}) == (256, {256})  # six windows, and a tree
            assert measured.untried


# ---------------------------------------------------------------- the command


def tune(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    prompts = str(folder.parent / "prompts.txt")
    assert run_program(["tune", str(folder), "--threads", "1", "--prompts", prompts, "--json", *more]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.parametrize("seconds", [0.1, 0.7, 2.0, 11.0])
def test_tuning_a_slow_model_ends_after_the_minutes_and_one_pass(
    host: Host, folder: Path, capsys: pytest.CaptureFixture[str], seconds: float
) -> None:
    host.cost = lambda nodes, drafts: seconds * (0.1 if drafts else 1 + nodes / 64)
    end = host.now + 60
    report = tune(folder, capsys, "--minutes", "1")
    assert host.began[-1] <= end
    assert report["choice"] is None
    assert report["doubt"].startswith("there was time to compare ")


def test_a_quiet_host_is_tuned_within_the_minutes_and_a_busy_one_keeps_what_it_had(
    host: Host, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end = host.now + 12
    quietly = tune(folder, capsys, "--minutes", "0.2", "--quality", "strict")
    assert host.began[-1] <= end
    assert (quietly["choice"]["method"]["method"], quietly["doubt"]) == ("eagle", None)
    digest = Pipeline.from_bundle(folder, threads=1).bundle.digest
    stored = read_tuning(digest).choices
    assert [choice.model_dump() for choice in stored.values()] == [quietly["choice"]]
    host.cost = wild()
    busily = tune(folder, capsys, "--minutes", "2", "--quality", "strict", "--temperature", "0")
    assert busily["choice"] is None
    assert "this host is too busy to measure in this time; run nothing else" in busily["doubt"]
    assert read_tuning(digest).choices == stored
    assert any(entry.greedy for entry in read_tuning(digest).statistics)  # which no clock can spoil


def test_reset_forgets_what_was_measured_for_a_bundle_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest = Pipeline.from_bundle(folder, threads=1).bundle.digest
    paths = [
        write_tuning(Tuning(bundle_digest=one, choices={str(SITUATION): Choice(method=Sjd())}))
        for one in (digest, "d" * 64)
    ]
    assert run_program(["tune", str(folder), "--reset"]) == 0
    assert capsys.readouterr().out == f"removed {paths[0]}\n"
    assert [path.exists() for path in paths] == [False, True]
    assert run_program(["tune", str(folder), "--reset"]) == 0
    assert capsys.readouterr().out == f"nothing was measured here for {folder}\n"
    assert read_tuning(digest) == Tuning(bundle_digest=digest)
    for removed in (str(write_tuning(Tuning(bundle_digest=digest))), None):
        assert run_program(["tune", str(folder), "--reset", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"removed": removed}
    assert run_program(["tune", str(folder), "--reset", "--temperature", "0"]) == 2
    assert "reset: measures nothing; leave out what measuring takes" in capsys.readouterr().err
