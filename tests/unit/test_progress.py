"""Progress: what takes more than two seconds is heard of, on a terminal and off it, with the time that is left."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tiny_bundle import make_tiny_bundle

from lantern_rt.cli import console
from lantern_rt.cli.console import _Lines, progress
from lantern_rt.cli.main import run_program

LEFT = r"about (\d+ s|\d+ min \d+ s|\d+ h \d+ min) left"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("words") / "tiny")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines at once instead of after seconds, and each thing lasts until a line has said it."""
    monkeypatch.setattr(console, "QUIET", 0.001)
    monkeypatch.setattr(console, "EVERY", 0.001)
    said, things, show, say = threading.Event(), [""], _Lines.show, console.say

    def shows(shown: _Lines, what: str, done: int = 0, total: int = 0) -> None:
        new = what not in shown.first
        things.append(what)
        said.clear()
        show(shown, what, done, total)
        assert not new or said.wait(30), what

    def says(line: str) -> None:
        say(line)
        if threading.current_thread().name == "progress" and line.startswith(f"{things[-1]}:"):
            said.set()

    monkeypatch.setattr(_Lines, "show", shows)
    monkeypatch.setattr(console, "say", says)


def lines(unit: str = "count", seconds: float | None = None) -> _Lines:
    shown = _Lines(False, unit, seconds)
    shown.began = 1000.0
    return shown


def test_a_line_says_how_much_is_done_and_how_long_the_rest_takes_at_this_speed() -> None:
    shown = lines()
    shown.first, shown.last = {"codes": (1000.0, 0)}, ("codes", 0, 16_384)
    assert shown.line(1003.0) == "codes: 0 of 16,384"
    shown.last = ("codes", 4096, 16_384)
    assert shown.line(1010.0) == "codes: 4,096 of 16,384, about 30 s left"
    shown.first = {"codes": (1000.0, 4000)}  # resumed: what was there before says nothing of the speed
    assert shown.line(1096.0) == "codes: 4,096 of 16,384, about 3 h 24 min left"
    shown.first, shown.last = {"sorting": (1000.0, 0)}, ("sorting", 0, 0)
    assert shown.line(1012.4) == "sorting: 12 s so far"


def test_amounts_may_be_bytes_and_the_whole_time_may_be_known_beforehand() -> None:
    shown = lines("bytes")
    shown.first, shown.last = {"reading": (1000.0, 0)}, ("reading", 250_000_000, 1_000_000_000)
    assert shown.line(1030.0) == "reading: 250 MB of 1,000 MB, about 1 min 30 s left"
    shown = lines(seconds=300.0)
    shown.first, shown.last = {"trying eagle": (1030.0, 0)}, ("trying eagle", 0, 0)
    assert shown.line(1065.0) == "trying eagle: 35 s so far, about 3 min 55 s left"
    assert shown.line(1400.0) == "trying eagle: 6 min 10 s so far, about 0 s left"


def test_what_is_quick_is_not_heard_of(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(lines=False) as show:
        show("codes", 3, 4)
    assert capsys.readouterr().err == ""
    with progress() as show:
        show("sorting")
        show("sorting")
        show("hashing")
    assert capsys.readouterr().err == "sorting\nhashing\n"


@pytest.mark.usefixtures("eager")
def test_one_long_call_is_heard_of_while_it_lasts_and_no_longer(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(lines=False) as show:
        show("sorting neighbours")
        time.sleep(0.2)
    heard = capsys.readouterr().err.splitlines()
    assert len(heard) > 3
    assert {*heard} == {"sorting neighbours: 0 s so far"}
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_run_off_a_terminal_says_every_few_seconds_how_long_it_still_takes(tmp_path: Path) -> None:
    slow = make_tiny_bundle(tmp_path / "slow", grid=128)
    command = [sys.executable, "-m", "lantern_rt", "run", str(slow), "red", "--threads", "1", "--method", "ar"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    heard = ""
    while not re.fullmatch(rf"codes: [\d,]+ of 16,384, {LEFT}\n", heard):
        heard = process.stderr.readline()
        assert re.match("checking|loading|preparing|codes", heard), heard
    process.send_signal(signal.SIGINT)
    out, rest = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert "lantern-rt: interrupted" in rest


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("command", "things"),
    [
        (["run", "BUNDLE", "red", "--num-images", "8"], ("(loading graphs|preparing): 0 s so far",)),
        (["bench", "BUNDLE", "--methods", "sjd", "--prompts", "prompts.txt"], ("turns: [0-3] of 8",)),
        (["eval", "BUNDLE", "--methods", "sjd", "--prompts", "prompts.txt"], ("(ar|sjd)",)),
        (["tune", "BUNDLE", "--minutes", "0.02", "--prompts", "prompts.txt"], (rf".*: \d s so far, {LEFT}",)),
        (["build-engine", "BUNDLE", "--output", "engines"], ("optimising target|checking the bundle's files",)),
    ],
)  # fmt: skip
def test_every_command_that_may_take_long_is_heard_of(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    command: list[str], things: tuple[str, ...],
) -> None:  # fmt: skip
    pytest.importorskip("scipy")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("red cube\ngreen sphere\n")
    assert run_program([str(folder) if word == "BUNDLE" else word for word in command]) == 0
    heard = capsys.readouterr().err
    for thing in things:
        assert re.search(rf"^{thing}", heard, re.MULTILINE), heard


def test_on_a_terminal_bars_show_the_time_that_is_left(tmp_path: Path) -> None:
    code = (
        "import time\nfrom lantern_rt.cli.console import progress\n"
        "with progress() as show:\n    show('sorting')\n    time.sleep(0.3)\n"
        "    for i in range(5):\n        show('codes', i, 4)\n        time.sleep(0.3)\n"
        "with progress(seconds=100) as show:\n    show('trying sjd')\n    time.sleep(0.3)\n"
        "with progress(bars=False) as show:\n    show('fetching', 1, 2)\n    time.sleep(0.3)\n"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"codes .* 2/4 0:00:0\d 00:0\d", text), text
    assert re.search(r"trying sjd .* 1 min (39|40) s left", text), text
    assert re.search(r"sorting .*0:00:00", text), text
    assert "fetching" not in text
