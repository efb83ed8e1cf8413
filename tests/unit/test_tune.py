"""The `tune` command: races of all qualities end, and what they found is what is drawn by from then on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bundle_folder import read_manifest, write_manifest
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline
from lantern_rt.auto.race import Race
from lantern_rt.cli.main import run_program
from lantern_rt.methods import Ar, Sjd

FIGURES = {"tokens_per_pass": 2.0, "excess_nll": 0.01, "images": 9, "date": "2026-11-24"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a preset that can be raced, and one that cannot."""
    folder = make_tiny_bundle(tmp_path_factory.mktemp("tune") / "tiny", grid=16)
    manifest = read_manifest(folder)
    methods = {
        "balanced": {"method": "rows", "window": 6, "drafts": 1},
        "fast": {"method": "sjd", "window": 7, "neighbors": 4, "residual": "aggregated", "lambda": 2.0},
    }
    manifest["presets"] = {name: {"method": method, "figures": FIGURES} for name, method in methods.items()}
    write_manifest(folder, manifest)
    return folder


@pytest.fixture
def tune(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `lantern-rt tune` with a cache of its own; stdout."""
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "prompts.txt").write_text("red cube\ngreen sphere on sand\n")
    capsys.readouterr()

    def run(*arguments: str) -> str:
        options = ["--threads", "1", "--prompts", str(tmp_path / "prompts.txt")]
        assert run_program(["tune", str(folder), *options, *arguments]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("arguments", [[], ["--batch", "2", "--greedy"]])
def test_every_race_ends_and_its_winner_draws_from_then_on(tune: Any, folder: Path, arguments: list[str]) -> None:
    report = json.loads(tune(*arguments, "--json"))
    qualities = {result["quality"]: result for result in report["qualities"]}
    assert list(qualities) == ["strict", "balanced", "fast"]
    for name in ("strict", "balanced"):
        assert qualities[name]["date"] is not None
        assert qualities[name]["drawn"] > 0
        assert qualities[name]["speed_up"] > 0
    assert qualities["fast"] == {**qualities["fast"], "rivals": 0, "drawn": 0, "speed_up": None, "date": None}
    assert qualities["fast"]["method"].startswith("sjd:")
    pipeline = Pipeline.from_bundle(folder, threads=1)
    images = qualities["strict"]["images"]
    temperature = 0.0 if report["greedy"] else None
    for name, result in qualities.items():
        drawn = pipeline(["red cube"] * images, method="auto", quality=name, temperature=temperature)
        assert str(drawn.settings.method) == result["method"]
    again = json.loads(tune(*arguments, "--json"))
    assert [result["drawn"] for result in again["qualities"]] == [0, 0, 0]


def test_in_the_minutes_given_the_best_so_far_is_the_answer_and_the_next_tune_goes_on(tune: Any) -> None:
    text = tune("--minutes", "0.0001")
    assert "strict is provisional: time is up" in text.splitlines()
    report = json.loads(tune("--minutes", "0.0001", "--json"))
    assert [result["provisional"] for result in report["qualities"]] == ["time is up", "time is up", None]
    assert {result["date"] for result in report["qualities"]} == {None}
    text = tune()
    assert "time is up" not in text
    assert max(map(len, text.splitlines()[:-1])) <= 80
    assert text.splitlines()[-1].endswith("; delete it to race anew")


def test_a_winner_of_turns_that_a_busy_host_disturbed_is_provisional(
    tune: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    race = Race(Ar(), [(Sjd(window=3),)])
    while not race.decided:
        race.record_pass(1.0, 1.0)
    assert not race.disturbed
    race = Race(Ar(), [(Sjd(window=3),)])
    for number in range(200):
        race.record_pass(1.0, 3.0 if number > 50 else 1.0)
    assert race.disturbed
    monkeypatch.setattr(Race, "disturbed", True)
    assert json.loads(tune("--json"))["qualities"][0]["provisional"] == "busy host"
