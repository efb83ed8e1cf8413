"""What was measured on this host and kept is damaged, or cannot be carried out: it is ignored, and a line names it."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_bundle import make_tiny_bundle

from lantern_rt.bundle.files import open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.errors import OutputError
from lantern_rt.methods import Sjd
from lantern_rt.output.files import cache_folder
from lantern_rt.planning.intervals import spread
from lantern_rt.planning.race import Race
from lantern_rt.planning.store import read_tuning

SITUATION = "onnxruntime-cpu, 1 thread, 1 image at a time, sampling, {}"
RUN = ["run", "--threads", "1", "--seed", "3", "--force"]
COST = {"target": {"2": 0.001, "8": 0.002}, "drafter": {"2": 0.001, "8": 0.002}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path / "cache"))
    return make_tiny_bundle(tmp_path / "tiny")


def stored(folder: Path, **content: Any) -> Path:
    """Store something as what was measured for a bundle."""
    digest = open_bundle(folder).digest
    path = cache_folder() / "tuning" / f"{digest[:32]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"bundle_digest": digest, "noise": "philox4x64-gumbel-1", **content}))
    return path


def chosen(**method: Any) -> dict[str, Any]:
    return {"choices": {SITUATION.format(quality): {"method": method} for quality in ("strict", "balanced")}}


DAMAGED: dict[str, dict[str, Any]] = {
    "a tree that is none": chosen(method="eagle", tree="oak"),
    "a tree too large": chosen(method="eagle", tree="dynamic-999-99-99"),
    "a window of a thousand million": chosen(method="sjd", window=10**9),
    "an omega below 0": chosen(method="sjd", omega=-1.0),
    "more neighbours than there are": chosen(method="lantern", neighbors=1000, delta=0.1),
    "control characters": chosen(method="eagle", tree="\x1b[2J"),
    "an endless number": chosen(method="sjd", window=10**300),
    "a race in no time": {"races": {SITUATION.format("strict"): [{"method": {"method": "ar"}, "seconds": [0.0]}]}},
    "passes in no time": {"probes": {"onnxruntime-cpu, 1 threads, 2 rows": {**COST, "target": {"2": 0.0}}}},
    "passes that cost less when larger": {"probes": {"a": {**COST, "target": {"2": 2.0, "4": 1.0}}}},
    "sizes in no order": {"probes": {"a": {**COST, "target": {"4": 1.0, "2": 1.0}}}},
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("quality", ["strict", "balanced"])
def test_run_ignores_them_with_one_line_that_names_the_file(
    folder: Path, content: dict[str, Any], quality: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = stored(folder, **content)
    assert run_program([*RUN, str(folder), "red", "--quality", quality]) == 0
    lines = capfd.readouterr().err.splitlines()
    (warning,) = [line for line in lines if line.startswith("warning: ")]
    assert str(path) in warning
    assert "ignored" in warning
    assert warning.isprintable()


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"{"), lambda path: (path.unlink(), os.mkfifo(path))])
def test_a_cache_that_is_no_json_or_a_pipe_is_ignored_with_a_warning(
    folder: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    path = stored(folder)
    damage(path)
    assert read_tuning(open_bundle(folder).digest).choices == {}
    (record,) = caplog.records
    assert (record.name.partition(".")[0], record.levelname) == ("lantern_rt", "WARNING")
    assert str(path) in record.getMessage()


def test_a_host_without_a_cache_is_no_cause_to_warn(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_tuning(open_bundle(folder).digest).choices == {}
    assert not caplog.records


def test_equal_timings_are_as_good_as_any(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    equal = dict.fromkeys(("2", "4", "8"), 0.001)
    probes = {f"onnxruntime-cpu, 1 threads, {rows} rows": {"target": equal, "drafter": equal} for rows in (1, 2)}
    stored(folder, probes=probes)
    assert run_program([*RUN, str(folder), "red", "--quality", "balanced"]) == 0
    assert "warning" not in capfd.readouterr().err


def test_a_clock_that_stands_still_divides_by_nothing() -> None:
    assert spread([0.0] * 9) == float("inf")
    race = Race(drafter=False, most_nodes=64)
    while not race.decided:
        race.record(1.0 if race.method != Sjd(window=3) else 3.0, 0.0)
    assert 0 < race.speed_up < float("inf")
    assert statistics.mean(race.timed[race.method].seconds) > 0


def test_a_user_without_a_home_folder_draws_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("LANTERN_RT_CACHE", "XDG_CACHE_HOME", "HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(OutputError, match=r"no home folder.*set LANTERN_RT_CACHE"):
        cache_folder()
    assert run_program([*RUN, str(folder), "red"]) == 0
    assert "Traceback" not in capfd.readouterr().err
