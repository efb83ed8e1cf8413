"""Progress output of work that takes more than two seconds: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tiny_bundle import make_tiny_bundle

from lantern_rt.cli import console
from lantern_rt.cli.console import show_progress
from lantern_rt.cli.main import run_program


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock of the console by a time that the test sets; return a list that holds the time in seconds."""
    clock_seconds = [1000.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock_seconds[0])
    return clock_seconds


def test_short_work_prints_only_the_names_of_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(announce_tasks=False) as progress:
        progress("codes", 3, 4)
    assert capsys.readouterr().err == ""
    with show_progress() as progress:
        progress("sorting")
        progress("sorting")
        progress("hashing (MB)", 0, 7)
    assert capsys.readouterr().err == "sorting\nhashing\n"


def test_a_progress_line_has_count_and_remaining_time(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(announce_tasks=False) as progress:
        progress("codes", 4000, 16_384)  # work that resumes at 4000: earlier codes do not count for the speed
        for seconds, done in ((3, 4000), (4, 4050), (96, 4096), (99, 4100), (102, 16_384)):
            clock[0] = 1000.0 + seconds
            progress("codes", done, 16_384)
    assert capsys.readouterr().err.splitlines() == [
        "codes [4,000/16,384]",
        "codes [4,096/16,384], about 3 h 24 min left",
        "codes [16,384/16,384], about 0 s left",
    ]


def test_the_remaining_time_decreases_while_the_count_stays(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with show_progress(announce_tasks=False) as progress:
        for seconds, done in ((0, 0), (60, 1), (80, 1), (115, 1), (400, 1)):
            clock[0] = 1000.0 + seconds
            progress("images", done, 3)
    remaining = [line.partition("about ")[2] for line in capsys.readouterr().err.splitlines()]
    assert remaining == ["2 min 0 s left", "1 min 40 s left", "1 min 5 s left", "0 s left"]


def test_a_progress_bar_on_a_terminal_shows_the_finished_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with show_progress() as progress:
        progress("[sorting]")
        for done in range(3):
            progress("codes", done, 4096)
    last_line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err).splitlines()[-1]
    assert re.search(r"codes .* \[2/4,096\]", last_line)
    assert "sorting" not in last_line


def test_run_without_a_terminal_prints_progress_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "FIRST_LINE_SECONDS", 0.0)
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    bundle = make_tiny_bundle(tmp_path / "tiny")
    assert run_program(["run", str(bundle), "red", "--output", str(tmp_path / "red.png"), "--threads", "1"]) == 0
    assert re.search(r"^tokens \[\d+/36\]", capsys.readouterr().err, re.MULTILINE)
