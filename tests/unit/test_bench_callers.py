"""`lantern-rt bench --concurrency`: what callers at the same time get of a service."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline
from lantern_rt.cli.main import run_program
from lantern_rt.compare.turns import Subjects
from lantern_rt.errors import EngineError
from lantern_rt.results import StreamStep
from lantern_rt.service import Service
from lantern_rt.tuning.callers import measure_callers

SUBJECTS = Subjects("prompts", ["red sphere", "green cube on sand"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("words") / "tiny")


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Pipeline:
    return Pipeline.from_bundle(folder, threads=1)


@pytest.fixture
def arguments(folder: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "prompts.txt").write_text("red sphere\ngreen cube on sand\n")
    return ["bench", str(folder), "--prompts", str(tmp_path / "prompts.txt"), "--threads", "1"]


def test_there_is_a_row_for_every_method_and_number_of_callers(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    extra = ["--concurrency", "1,3", "--images", "4", "--methods", "auto, ar", "--json"]
    assert run_program([*arguments, *extra]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = [(row["label"], row["callers"], row["images"]) for row in report["rows"]]
    assert rows == [("ar", 1, 4), ("ar", 3, 9), ("auto", 1, 4), ("auto", 3, 9)], "each caller gets three at least"
    for row in report["rows"]:
        assert 0 < row["median_seconds"] <= row["p95_seconds"]
        assert row["images_per_second"] <= row["callers"] * row["images"] / row["median_seconds"]
        assert row["drawn_by"].startswith("ar" if row["label"] == "ar" else ("ar", "sjd", "eagle"))
    assert (report["bundle"], report["threads"]) == ("tiny", 1)
    assert report["together"] > 0


def test_the_table_is_of_auto_where_nothing_else_is_asked_for(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program([*arguments, "--concurrency", "2", "--images", "2"]) == 0
    title, heading, row, *notes = capsys.readouterr().out.splitlines()
    assert title.startswith("tiny (")
    assert heading.split() == ["method", "callers", "images", "images/s", "median", "s", "p95", "s", "drawn", "by"]
    assert row.split()[:3] == ["auto:quality=strict", "2", "6"]
    assert notes[0].startswith("threads: 1; images that share passes: at most ")


@pytest.mark.parametrize("given", ["0", "257", "two", "1,,2", "", "1.5"])
def test_numbers_of_callers_are_whole_and_bounded(
    arguments: list[str], given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program([*arguments, "--concurrency", given]) == 2
    line = f"--concurrency: found {given!r}, expected whole numbers 1 .. 256 joined by commas"
    assert line in capsys.readouterr().err


def test_what_compares_methods_does_not_go_with_callers(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for extra in (["--batch", "2"], ["--sweep"], ["--plot", str(tmp_path / "speed.png")]):
        assert run_program([*arguments, "--concurrency", "2", *extra]) == 2
        assert "--concurrency: leave --batch, --sweep and --plot out" in capsys.readouterr().err


class Counting(Service):
    """A service that knows how many images it had at most."""

    most = 0

    def submit(self, *given: Any, **options: Any) -> Any:
        ticket = super().submit(*given, **options)
        self.most = max(self.most, self.images)
        return ticket


def test_so_many_callers_ask_at_a_time_and_each_image_counts_once(pipe: Pipeline) -> None:
    shown: list[tuple[int, int]] = []
    with Counting(pipe, together=8) as service:
        found = measure_callers(service, 4, 12, SUBJECTS, {"method": "ar"}, True, lambda *done: shown.append(done))
    assert service.most == 4
    assert shown == [(i + 1, 12) for i in range(12)]
    assert (found["callers"], found["images"], found["drawn_by"]) == (4, 12, "ar")


def test_pictures_are_decoded_one_at_a_time_or_not_at_all(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    free, painted = threading.Lock(), []

    def image(step: StreamStep, i: int) -> None:
        assert free.acquire(blocking=False)
        painted.append(i)
        free.release()

    monkeypatch.setattr(StreamStep, "image", image)
    with Service(pipe) as service:
        measure_callers(service, 3, 6, SUBJECTS, {}, paint=False)
        assert painted == []
        measure_callers(service, 3, 6, SUBJECTS, {}, paint=True)
    assert painted == [0] * 6


def test_an_error_in_a_pass_ends_the_measurement(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise EngineError("the engine broke")

    monkeypatch.setattr("lantern_rt.runtime.scheduler.Scheduler.step", fail)
    with Service(pipe) as service, pytest.raises(EngineError, match="the engine broke"):
        measure_callers(service, 2, 6, SUBJECTS, {}, paint=False)
