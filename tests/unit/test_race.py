"""Method `auto`: which exact method is fastest is found while drawing, by passes of invented cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from statistics_entries import windows_of
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline
from lantern_rt.methods import Ar, Eagle, MethodConfig, Sjd
from lantern_rt.planning.race import TREES, WINDOWS, Race
from lantern_rt.planning.store import Choice, Tuning, forget_tuning, read_tuning, write_tuning
from lantern_rt.requests import resolve_settings
from lantern_rt.runtime.tree_names import named_tree


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path / "cache"))


class Host:
    """What passes give and cost: `tokens` and `seconds` by nodes."""

    def __init__(self, tokens: dict[int, float], seconds: dict[int, float], seed: int = 0) -> None:
        self.tokens, self.seconds, self.rng = tokens, seconds, np.random.default_rng(seed)

    def run(self, race: Race, passes: int) -> list[MethodConfig]:
        """So many passes; which method made each."""
        made: list[MethodConfig] = []
        for _ in range(passes):
            made.append(race.method)
            nodes = nodes_of(race.method)
            noise = self.rng.choice([0.5, 1.0, 1.5]) if nodes > 1 else 1.0
            disturbed = 10.0 if self.rng.random() < 0.2 else 1.0
            race.record(max(1.0, self.tokens[nodes] * noise), self.seconds[nodes] * disturbed)
        return made


def nodes_of(method: MethodConfig) -> int:
    if isinstance(method, Eagle):
        return 100 + named_tree(method.tree).nodes
    return method.window + 1 if isinstance(method, Sjd) else 1


GIVES = {1: 1.0, 4: 1.9, 8: 2.6, 16: 3.4, 32: 4.3, 104: 2.3, 108: 2.9, 116: 3.5, 132: 4.0}
CPU = {1: 1.0, 4: 1.1, 8: 1.4, 16: 2.2, 32: 4.0, 104: 2.3, 108: 3.2, 116: 5.0, 132: 9.0}
WIDE = {1: 1.0, 4: 1.0, 8: 1.0, 16: 1.0, 32: 1.0, 104: 1.2, 108: 1.2, 116: 1.3, 132: 1.3}
DRAFTER = {**CPU, 104: 1.2, 108: 1.3, 116: 1.9, 132: 4.0}
SLOW = {nodes: 9.0 if nodes > 1 else 1.0 for nodes in GIVES}


@pytest.mark.parametrize(
    ("costs", "winner"),
    [(CPU, 8), (WIDE, 32), (SLOW, 1), (DRAFTER, 108)],
    ids=["a CPU", "nodes are free", "only plain decoding is cheap", "the drafter is cheap"],
)
def test_nearly_all_speed_is_found_though_every_fifth_pass_is_disturbed(costs: dict[int, float], winner: int) -> None:
    def speed(nodes: int) -> float:
        return GIVES[nodes] / costs[nodes] / (GIVES[winner] / costs[winner])

    assert max(GIVES, key=speed) == winner
    kept = []
    for seed in range(20):
        race = Race(True, 1000)
        assert Host(GIVES, costs, seed).run(race, 600)[-1] == race.method
        assert race.decided
        kept.append(speed(nodes_of(race.method)))
    assert sum(kept) / len(kept) > 0.9


def test_larger_sizes_run_only_while_they_gain_and_what_is_hopeless_only_shortly() -> None:
    made = Host(GIVES, SLOW).run(Race(True, 1000), 100)
    assert {nodes_of(method) for method in made} == {1, 4, 104}
    assert sum(isinstance(method, Eagle) for method in made) == 5
    assert made[:10] == [Ar()] * 10


def test_known_tokens_spare_a_race_the_luck_of_its_passes() -> None:
    """Here the passes of windows of 3 fall on easier rows than those of longer ones."""
    race, unlucky = Race(False, 1000, known={Sjd(window=w): GIVES[w + 1] for w in WINDOWS}), {**GIVES, 4: 2.5, 8: 2.1}
    assert Host(unlucky, CPU).run(race, 600)[-1] == race.method == Sjd(window=7)
    assert race.tokens == GIVES[8]
    blind = Race(False, 1000)
    assert Host(unlucky, CPU).run(blind, 600)[-1] == blind.method == Sjd(window=3)


def test_auto_races_with_the_tokens_of_acceptance_statistics(tmp_path: Path) -> None:
    pipe = Pipeline.from_bundle(make_tiny_bundle(tmp_path / "tiny"), threads=1)
    write_tuning(Tuning(bundle_digest=pipe.bundle.digest, statistics=(windows_of({3: 1.9, 7: 2.5}),)))
    race = pipe.chooser.race(1, resolve_settings(pipe.bundle.manifest, {"method": "auto"}))
    seconds = {Ar(): 1.0, Sjd(window=3): 1.2, Sjd(window=7): 1.3}
    while not race.decided:
        race.record(1.0, seconds.get(race.method, 9.0))
    assert (race.method, race.tokens, race.speed_up) == (Sjd(window=7), 2.5, pytest.approx(2.5 / 1.3))


def test_a_race_goes_on_where_an_earlier_one_stopped() -> None:
    whole, host = Race(True, 1000), Host(GIVES, CPU)
    host.run(whole, 60)
    again = Race(True, 1000, tuple(whole.timed.values()))
    assert not again.decided
    assert again.timed == whole.timed
    host.run(again, 400)
    assert again.decided
    assert len(again.timed[again.method].tokens) > len(whole.timed[again.method].tokens)


def test_a_race_is_among_what_the_engines_and_the_bundle_can_do() -> None:
    assert Race(False, 1000).methods == [Ar(), *(Sjd(window=window) for window in WINDOWS)]
    assert Race(True, 8).methods == [Ar(), Sjd(window=3), Sjd(window=7), *(Eagle(tree=tree) for tree in TREES[:2])]
    assert Race(True, 1).decided


def test_where_only_plain_decoding_can_run_it_is_kept_untimed(tmp_path: Path) -> None:
    pipe = Pipeline.from_bundle(make_tiny_bundle(tmp_path / "tiny"), threads=1)
    pipe.engines.most_nodes = 1
    assert pipe("red sphere").settings.method == Ar()
    (choice,) = read_tuning(pipe.bundle.digest).choices.values()
    assert (choice.method, choice.tokens_per_forward_pass) == (Ar(), 1.0)


def test_images_drawn_during_a_race_are_those_of_ar_and_its_result_is_kept(tmp_path: Path) -> None:
    pipe = Pipeline.from_bundle(make_tiny_bundle(tmp_path / "tiny"), threads=1)
    digest = pipe.bundle.digest
    for seed in range(40):
        result = pipe("red sphere", seed=seed)
        np.testing.assert_array_equal(result.codes[0], pipe("red sphere", seed=seed, method="ar").codes[0])
        if read_tuning(digest).choices:
            break
        assert len(read_tuning(digest).races) == 1
        assert "still finding out" in str(result.settings.choice)
        pipe = Pipeline.from_bundle(pipe.bundle, threads=1)  # as another process would
    (choice,) = read_tuning(digest).choices.values()
    assert (choice.found, read_tuning(digest).races) == ("while drawing", {})
    later = pipe("red sphere").settings
    assert later.method == choice.method
    assert "while drawing on 20" in str(later.choice)
    pipe = Pipeline.from_bundle(pipe.bundle, threads=1)
    race = pipe.chooser.race(1, resolve_settings(pipe.bundle.manifest, {"method": "auto"}))  # a service's, say
    assert (race.decided, race.method) == (True, choice.method)
    assert race.describe() == f"auto: {choice.method}, found to be the fastest here before"


def test_a_race_that_another_process_decided_meanwhile_keeps_nothing(tmp_path: Path) -> None:
    pipe = Pipeline.from_bundle(make_tiny_bundle(tmp_path / "tiny"), threads=1)
    asked, digest = resolve_settings(pipe.bundle.manifest, {"method": "auto"}), pipe.bundle.digest
    race = pipe.chooser.race(1, asked)
    Host(GIVES, CPU).run(race, 12)
    pipe.chooser.give_back(1, asked, race)
    choice = Choice(method=Sjd(window=31), speed_up=1.5, found="while drawing")  # not timed here yet
    (situation,) = read_tuning(digest).races
    write_tuning(Tuning(bundle_digest=digest, choices={situation: choice}))
    later = pipe.chooser.race(1, asked)
    assert (later.decided, later.method) == (True, choice.method)
    pipe.chooser.give_back(1, asked, later)
    assert read_tuning(digest).choices == {situation: choice}
    forget_tuning(digest)  # by `tune --reset`
    pipe.chooser.give_back(1, asked, later)
    assert not read_tuning(digest).choices


def test_passes_of_the_last_images_of_a_batch_tell_nothing_of_its_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[float] = []
    monkeypatch.setattr(Race, "record", lambda race, tokens, seconds: recorded.append(tokens))
    monkeypatch.setattr(Race, "_next", lambda race: (Sjd(window=3), False))
    pipe = Pipeline.from_bundle(make_tiny_bundle(tmp_path / "tiny"), threads=1)
    steps = list(pipe.stream(["red sphere", "green cube", "sand"], seed=3))
    new = [[len(codes) for codes in step.new_codes] for step in steps if step.done > len(step.new_codes)]
    assert any(0 in codes for codes in new)
    assert recorded == [sum(codes) / 3 for codes in new if 0 not in codes]
