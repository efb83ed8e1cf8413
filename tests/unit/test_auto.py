"""Method `auto`: a race among settings that draw the same pictures, by passes of invented cost and on real bundles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline, RequestError
from lantern_rt.auto.presets import ROW_DRAFTS, TREES, WINDOWS, same_pictures
from lantern_rt.auto.race import Race
from lantern_rt.auto.store import Choice, Tuning, read_tuning, tuning_path, write_tuning
from lantern_rt.bundle.files import open_bundle
from lantern_rt.methods import Ar, Eagle, MethodConfig, RowParallel, Sjd
from lantern_rt.requests import resolve_settings
from lantern_rt.runtime.tree_names import named_tree
from lantern_rt.service import Service

EXACT = (tuple(Sjd(window=window) for window in WINDOWS), tuple(Eagle(tree=tree) for tree in TREES))
FIGURES = {"tokens_per_pass": 2.0, "excess_nll": 0.01, "images": 400, "date": "2026-11-24"}
PRESETS: dict[str, Any] = {
    "balanced": {"method": {"method": "sjd", "window": 3, "neighbors": 4, "lambda": 2.0}, "figures": FIGURES},
    "fast": {"method": {"method": "rows", "window": 3}, "figures": FIGURES},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle with presets."""
    made = make_tiny_bundle(tmp_path / "tiny")
    manifest = json.loads((made / "bundle.json").read_text())
    (made / "bundle.json").write_text(json.dumps(manifest | {"presets": PRESETS}))
    return made


class Host:
    """What passes give and cost: `tokens` and `seconds` by nodes."""

    def __init__(self, tokens: dict[int, float], seconds: dict[int, float], seed: int = 0) -> None:
        self.tokens = tokens
        self.seconds = seconds
        self.rng = np.random.default_rng(seed)

    def run(self, race: Race, passes: int) -> list[MethodConfig]:
        """So many passes; which method made each."""
        made: list[MethodConfig] = []
        for _ in range(passes):
            made.append(race.method)
            nodes = nodes_of(race.method)
            luck = self.rng.choice([0.5, 1.0, 1.5]) if nodes > 1 else 1.0
            disturbance = 5.0 if self.rng.random() < 0.1 else 1.0
            race.record_pass(max(1.0, self.tokens[nodes] * luck), self.seconds[nodes] * disturbance)
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
def test_nearly_all_speed_is_reached_though_every_tenth_pass_is_disturbed(costs: dict[int, float], winner: int) -> None:
    def speed(nodes: int) -> float:
        return GIVES[nodes] / costs[nodes] / (GIVES[winner] / costs[winner])

    assert max(GIVES, key=speed) == winner
    kept = []
    for seed in range(20):
        race = Race(Ar(), EXACT)
        assert Host(GIVES, costs, seed).run(race, 1500)[-1] == race.method
        assert race.decided
        kept.append(speed(nodes_of(race.method)))
    assert sum(kept) / len(kept) > 0.9


def test_larger_sizes_run_only_while_they_gain_and_what_is_hopeless_only_one_turn() -> None:
    made = Host(GIVES, SLOW).run(Race(Ar(), EXACT), 300)
    assert {nodes_of(method) for method in made} == {1, 4, 104}
    assert sum(method != Ar() for method in made) == 28
    assert made[:14] == [Ar()] * 14


def test_turns_of_whole_batches_count_the_passes_of_their_last_images() -> None:
    """Full passes of the window look 1.5 times as fast, yet the batch takes longer."""
    race = Race(Ar(), (EXACT[0][:1],), whole=True)
    while not race.decided:
        window = race.method != Ar()
        for _ in range(60 if window else 100):
            race.record_pass(1.5 if window else 1.0, 1.0)
        if window:
            for _ in range(40):
                race.record_pass(0.25, 1.0)
        race.end_turn()
    assert race.method == Ar()


def test_a_race_goes_on_where_an_earlier_one_stopped() -> None:
    host = Host(GIVES, CPU)
    race = Race(Ar(), EXACT)
    host.run(race, 60)
    again = Race(Ar(), EXACT, race.records)
    assert again.turns == race.turns
    assert not again.decided
    host.run(again, 1500)
    assert again.decided
    assert again.leader == again.method


def test_only_what_draws_the_same_pictures_is_raced(folder: Path) -> None:
    manifest = open_bundle(folder).manifest
    relaxed = Sjd(window=3, lambda_=2.0, neighbors=4)
    assert same_pictures(manifest, Ar(), True, 1000) == (Ar(), EXACT)
    assert same_pictures(manifest, Ar(), True, 8) == (Ar(), (EXACT[0][:2], EXACT[1][:2]))
    assert same_pictures(manifest, Ar(), False, 1000) == (Ar(), ())
    assert same_pictures(manifest, relaxed, True, 1000) == (relaxed, ())
    plain, (ladder,) = same_pictures(manifest, RowParallel(window=4, drafts=2), True, 1000)
    assert [plain, *ladder] == [RowParallel(window=4, drafts=drafts) for drafts in ROW_DRAFTS]


@pytest.mark.parametrize("quality", ["strict", "balanced", "fast"])
def test_a_quality_draws_the_pictures_of_its_method_whatever_races_and_caches_say(folder: Path, quality: str) -> None:
    pipe = Pipeline.from_bundle(folder, threads=1)
    method = pipe.bundle.manifest.preset_method(quality)  # type: ignore[arg-type]
    for seed in range(30):
        result = pipe(["red sphere", "green cube on sand"][: 1 + seed % 2], seed=seed, quality=quality)
        by_name = pipe(["red sphere", "green cube on sand"][: 1 + seed % 2], seed=seed, method=method)
        for codes, expected in zip(result.codes, by_name.codes, strict=True):
            np.testing.assert_array_equal(codes, expected)
        assert f"({quality}" in str(result.settings.choice)
        if seed % 7 == 0:
            pipe = Pipeline.from_bundle(pipe.bundle, threads=1 + seed % 2)  # as another process would


@pytest.mark.parametrize("quality", ["strict", "fast"])
def test_a_service_draws_the_same_pictures_under_any_load(folder: Path, quality: str) -> None:
    pipe = Pipeline.from_bundle(folder, threads=1)
    pictures: dict[int, Any] = {}
    with Service(pipe, together=4) as service:
        tickets = []
        for seed in range(12):

            def hear(step: Any, seed: int = seed) -> None:
                pictures[seed] = step

            tickets.append(
                service.submit(hear, "red cube", seed=seed, num_images=1 + seed % 2, quality=quality, steps=False)
            )
        service.close()
    method = pipe.bundle.manifest.preset_method(quality)  # type: ignore[arg-type]
    for seed, step in pictures.items():
        expected = pipe("red cube", seed=seed, num_images=1 + seed % 2, method=method).codes
        assert all(np.array_equal(*pair) for pair in zip(step.codes, expected, strict=True))


def test_the_winner_of_a_race_is_stored_and_taken_from_then_on(folder: Path) -> None:
    pipe = Pipeline.from_bundle(folder, threads=1)
    digest = pipe.bundle.digest
    for seed in range(200):
        pipe("red sphere", seed=seed)
        if read_tuning(digest).choices:
            break
        assert len(read_tuning(digest).races) == 1
    (choice,) = read_tuning(digest).choices.values()
    assert read_tuning(digest).races == {}
    again = Pipeline.from_bundle(folder, threads=1)
    settings = again("red sphere").settings
    assert settings.method == choice.method


def test_a_race_that_another_process_decided_meanwhile_keeps_nothing(folder: Path) -> None:
    pipe = Pipeline.from_bundle(folder, threads=1)
    settings = resolve_settings(pipe.bundle.manifest, {"method": "auto"})
    race = pipe.chooser.race(1, settings)
    Host(GIVES, CPU).run(race, 30)
    pipe.chooser.keep(1, settings, race)
    (key,) = read_tuning(pipe.bundle.digest).races
    tuning = Tuning(bundle_digest=pipe.bundle.digest, choices={key: Choice(method=Sjd(window=31), speed_up=1.5)})
    write_tuning(tuning)
    later = pipe.chooser.race(1, settings)
    assert (later.decided, later.method) == (True, Sjd(window=31))
    pipe.chooser.keep(1, settings, race)
    assert read_tuning(pipe.bundle.digest) == tuning


def test_relaxed_presets_leave_nothing_to_race_or_to_store(folder: Path) -> None:
    pipe = Pipeline.from_bundle(folder, threads=1)
    result = pipe("red sphere", quality="balanced")
    assert result.settings.method == pipe.bundle.manifest.preset_method("balanced")
    assert result.settings.choice == f"auto chose {result.settings.method} (balanced)"
    assert not tuning_path(pipe.bundle.digest).exists()


@pytest.mark.parametrize("damage", ["{", '{"bundle_digest": "0"}', '{"bundle_digest": 3}', "[" * 100_000])
def test_a_damaged_file_of_measurements_counts_as_none(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = Pipeline.from_bundle(folder, threads=1)
    path = tuning_path(pipe.bundle.digest)
    path.parent.mkdir(parents=True)
    path.write_text(damage)
    assert pipe("red sphere").settings.method.exact
    assert ("they are ignored" in caplog.text) == (damage != '{"bundle_digest": "0"}')


def test_a_cache_that_cannot_be_written_is_said_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path / "file"))
    pipe = Pipeline.from_bundle(folder, threads=1)
    pipe("red sphere")
    pipe("red sphere", seed=1)
    assert caplog.text.count("what was measured is not kept") == 1


def test_a_preset_that_a_bundle_lacks_is_refused_with_the_way_to_get_it(tmp_path: Path) -> None:
    manifest = open_bundle(make_tiny_bundle(tmp_path / "bare")).manifest
    for quality in ("balanced", "fast", "superb", "TVD=0.1"):
        with pytest.raises(RequestError) as refusal:
            resolve_settings(manifest, {"method": "auto", "quality": quality})
        assert refusal.value.field == "quality"
        assert ("--write-presets" in refusal.value.remedy) == (quality in ("balanced", "fast"))
