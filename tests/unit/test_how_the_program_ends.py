"""Exit codes and errors of the program after failures of the system.

The failures: full and closed streams, no home folder, full disks, limits on threads, and Ctrl-C.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from refusals import catch_error
from tiny_bundle import make_tiny_bundle

from lantern_rt import OutputError
from lantern_rt.cli.main import run_program
from lantern_rt.engines.host import choose_thread_count
from lantern_rt.errors import EngineError
from lantern_rt.output.files import find_cache_folder

PROGRAM = f"{sys.executable} -m lantern_rt"


def run_shell_command(line: str, folder: Path) -> tuple[int, str, str]:
    line = line.replace("lantern-rt", PROGRAM).replace("BUNDLE", str(folder))
    process = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    return process.returncode, process.stdout, process.stderr


@contextmanager
def limit_file_size(bytes_left: int) -> Iterator[None]:
    """Limit the size of files that this process writes, to simulate a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("streams", "code", "out", "err"),
    [
        ("inspect BUNDLE > /dev/full", 2, False, True),
        ("inspect BUNDLE | true; exit ${PIPESTATUS[0]}", 0, False, False),
        ("inspect BUNDLE 1>&-", 0, False, False),
        ("inspect BUNDLE 0>&- 2>&-", 0, True, False),
        ("inspect nowhere 2> /dev/full", 2, False, False),
    ],
)
def test_full_and_closed_standard_streams_cause_no_traceback(
    words_bundle: Path, streams: str, code: int, out: bool, err: bool
) -> None:
    result = run_shell_command(f"lantern-rt {streams}", words_bundle)
    assert (result[0], bool(result[1])) == (code, out)
    assert result[2].count("\n") == err
    assert "Traceback" not in result[2]


def test_ctrl_c_exits_with_130_and_the_command_continues_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = make_tiny_bundle(tmp_path / "slow", grid=16)
    command = ["run", str(bundle), "red", "--threads", "1", "--method", "ar", "--seed", "0", "--count", "1000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lantern_rt", *command], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    while not [*tmp_path.glob("*.png")]:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("lantern-rt: interrupted")
    finished_images = [*tmp_path.glob("*.png")]
    assert len(finished_images) < 1000
    assert all(path.read_bytes().endswith(b"IEND\xaeB`\x82") for path in finished_images)
    assert [*tmp_path.glob(".*/*")] == []
    monkeypatch.chdir(tmp_path)
    assert run_program([*command[:-1], "2"]) == 0
    assert "of 2 images exist already" in capsys.readouterr().err


@pytest.fixture(scope="module")
def unprivileged_command() -> list[str]:
    """Return words that start a command as another user than root, because root ignores limits on processes."""
    if os.getuid() != 0:
        return []
    rights = ("--inh-caps=+dac_override", "--ambient-caps=+dac_override")  # the user can read and write files of root
    words = ["setpriv", "--reuid=65534", "--clear-groups", *rights]
    if shutil.which(words[0]) is None or subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("root cannot give up its rights here")
    return words


@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize(("threads", "code", "message"), [("64", 2, "lantern-rt: --threads: "), ("1", 0, "ar: ")])
def test_under_a_process_limit_one_thread_is_enough(
    words_bundle: Path, tmp_path: Path, unprivileged_command: list[str],
    processes: int, threads: str, code: int, message: str,
) -> None:  # fmt: skip
    run = ["-m", "lantern_rt", "run", str(words_bundle), "red", "--method", "ar", "--threads", threads]
    words = ["bash", "-c", f'ulimit -u {processes}; exec "$@"', "bash", *unprivileged_command, sys.executable, *run]
    process = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (process.returncode, process.stderr.splitlines()[-1][: len(message)]) == (code, message)
    assert "OpenBLAS" not in process.stderr
    assert process.stderr.count("\n") == 1 or code == 0


def test_a_thread_that_cannot_be_started_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", fail)
    error = catch_error(EngineError, choose_thread_count, 64)
    assert (error.field, error.found) == ("threads", "64")
    monkeypatch.setattr("lantern_rt.cli.doctor.make_host_report", fail)
    assert run_program(["doctor"]) == 2
    assert capsys.readouterr().err == "lantern-rt: the system cannot start more threads; raise `ulimit -u`\n"


def test_a_trace_beyond_the_disk_leaves_no_file(tmp_path: Path, program: Any) -> None:
    large = make_tiny_bundle(tmp_path / "large", grid=24)
    command = ("run", large, "red", "--seed", 0, "--threads", 1, "--method", "sjd", "--trace", "a.npz")
    assert program(*command)[0] == 0
    image_bytes = (tmp_path / "red-seed0.png").stat().st_size
    assert image_bytes + 1024 < (tmp_path / "a.npz").stat().st_size  # enough for the image but not for the trace
    for path in tmp_path.glob("*.*"):
        path.unlink()
    with limit_file_size(image_bytes + 1024):
        code, _, err = program(*command)
    assert (code, "lantern-rt: a.npz: cannot be written (File too large)" in err.splitlines()[-1]) == (2, True)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["red-seed0.png"]


def test_a_user_without_a_home_folder_can_generate_an_image(
    words_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LANTERN_RT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    assert run_program(["run", str(words_bundle), "red"]) == 0
    with pytest.raises(OutputError, match="no home folder"):
        find_cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_cache_folder() == tmp_path / "lantern-rt"


def test_a_prompt_of_bytes_that_are_no_text_is_rejected(words_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["run", str(words_bundle), "red \udcff cube"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
