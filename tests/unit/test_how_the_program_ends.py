"""Streams that are full or closed, no home folder, full disks, Ctrl-C at once: a line at most, and 0, 2 or 130."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline, RequestError
from lantern_rt.cli.main import run_program
from lantern_rt.output.files import cache_folder
from lantern_rt.planning.store import read_tuning

PROGRAM = f"{sys.executable} -m lantern_rt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("words") / "tiny")


def shell(line: str, folder: Path, cwd: Path | None = None, **environment: str) -> tuple[int, str, str]:
    line = line.replace("lantern-rt", PROGRAM).replace("BUNDLE", str(folder))
    environ = {**os.environ, "PYTHONUNBUFFERED": "", **environment}
    done = subprocess.run(["bash", "-c", line], cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["inspect BUNDLE", "inspect BUNDLE --json", "inspect --help", "--version"])
def test_a_full_standard_output_is_one_line_and_exit_code_2(folder: Path, command: str, unbuffered: str) -> None:
    code, _, err = shell(f"lantern-rt {command} > /dev/full", folder, PYTHONUNBUFFERED=unbuffered)
    refusal = "lantern-rt: standard output: cannot be written (No space left on device); send it elsewhere\n"
    assert (code, err) == (2, refusal)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["inspect BUNDLE", "inspect --help", "doctor"])
def test_a_reader_that_has_enough_is_no_failure(folder: Path, command: str, unbuffered: str) -> None:
    line = f"lantern-rt {command} | true; exit ${{PIPESTATUS[0]}}"
    code, _, err = shell(line, folder, PYTHONUNBUFFERED=unbuffered)
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("closed", "written"),
    [("1>&-", {"err"}), ("2>&-", {"out"}), ("0>&-", {"out", "err"}), ("0>&- 1>&- 2>&-", set())],
)
def test_closed_descriptors_count_as_the_null_device(
    folder: Path, tmp_path: Path, closed: str, written: set[str]
) -> None:
    line = f"lantern-rt run --bundle BUNDLE --prompt red --threads 1 {closed}"
    code, out, err = shell(line, folder, tmp_path)
    assert code == 0
    assert out == ("red-seed0.png\n" if "out" in written else "")
    assert bool(err) == ("err" in written)
    assert (tmp_path / "red-seed0.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = shell(f"lantern-rt inspect nowhere {closed}", folder)
    assert (code, out) == (2, "")


def test_a_full_standard_error_changes_neither_output_nor_exit_code(folder: Path, tmp_path: Path) -> None:
    line = "lantern-rt run --bundle BUNDLE --prompt red --threads 1 2> /dev/full"
    assert shell(line, folder, tmp_path) == (0, "red-seed0.png\n", "")
    assert shell("lantern-rt inspect nowhere 2> /dev/full", folder)[0] == 2


def test_a_full_disk_is_said_of_a_trace_and_leaves_no_part_of_it(tmp_path: Path) -> None:
    large = make_tiny_bundle(tmp_path / "large", grid=24)
    run = "lantern-rt run --bundle BUNDLE --prompt red --threads 1 --method sjd --trace a.npz"
    assert shell(run, large, tmp_path)[0] == 0
    image, trace = ((tmp_path / name).stat().st_size for name in ("red-seed0.png", "a.npz"))
    assert image + 1024 < trace  # room for the image only
    for path in tmp_path.glob("*.*"):
        path.unlink()
    code, _, err = shell(f"ulimit -f {-(-image // 1024) + 1}; {run}", large, tmp_path)
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith("lantern-rt: a.npz: cannot be written (File too large)")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["red-seed0.png"]


@pytest.mark.parametrize("command", ["run --bundle BUNDLE --prompt red", "run --bundle BUNDLE --prompt red --json"])
def test_a_cache_that_cannot_be_written_is_said_once_and_the_image_is_there(
    folder: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "cache")
    code, _, err = shell(f"lantern-rt {command} --threads 1", folder, tmp_path, LANTERN_RT_CACHE=place)
    assert code == 0
    assert err.count(f"warning: what was measured is not kept: {place}") == 1
    assert "set LANTERN_RT_CACHE to a folder that can" in err
    assert (tmp_path / "red-seed0.png").is_file()


def test_tuning_that_cannot_be_kept_is_refused_and_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path / "cache"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("red cube\ngreen sphere\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        command = ["tune", str(folder), "--minutes", "0.02", "--prompts", str(prompts), "--threads", "1"]
        assert run_program(command) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lantern-rt: {tmp_path / 'cache'}")
    assert "cannot be written (File too large); set LANTERN_RT_CACHE to a folder that can" in line
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_full_disk_leaves_no_part_of_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path))
    pipe = Pipeline.from_bundle(folder, threads=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with caplog.at_level(logging.WARNING):
            for seed in range(3):
                assert len(pipe("red", seed=seed).images) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [record.getMessage().partition("(")[2][:14] for record in caplog.records] == ["File too large"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_user_without_a_home_folder_draws_and_is_told_what_is_not_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LANTERN_RT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    assert run_program(["run", "--bundle", str(folder), "--prompt", "red", "--threads", "1"]) == 0
    assert "what was measured is not kept: " in capsys.readouterr().err
    assert run_program(["tune", str(folder), "--reset"]) == 2
    assert "found no home folder to keep measurements in; set LANTERN_RT_CACHE" in capsys.readouterr().err
    digest = Pipeline.from_bundle(folder, threads=1).bundle.digest
    assert read_tuning(digest).bundle_digest == digest
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lantern-rt"


def test_bytes_that_are_no_text_are_refused_as_a_prompt(folder: Path) -> None:
    code, out, err = shell("lantern-rt run --bundle BUNDLE --prompt $'red \\xff cube'", folder)
    assert (code, out) == (2, "")
    assert err == "lantern-rt: --prompt: found 'red \\udcff cube', which is no text in UTF-8; type it again\n"
    with pytest.raises(RequestError, match="no text in UTF-8"):
        Pipeline.from_bundle(folder, threads=1)(["red", "\ud83d"])


# ---------------------------------------------------------------- Ctrl-C

INTERRUPTED_AT = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
sys.argv = ["lantern-rt", "doctor"]
from lantern_rt.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["lantern_rt.cli", "lantern_rt.cli.main", "typer", "lantern_rt.cli.app"])
def test_ctrl_c_during_any_import_of_the_program_is_answered(module: str) -> None:
    code = INTERRUPTED_AT.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr.startswith("lantern-rt: interrupted")
    assert done.stderr.count("\n") == 1


def test_before_ctrl_c_is_answered_next_to_nothing_is_imported() -> None:
    code = "import sys; before = {*sys.modules}; import lantern_rt.__main__; print(*{*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert "lantern_rt.errors" in done.stdout.split()
    assert {"typing", "pathlib", "re", "enum", "contextlib"}.isdisjoint(done.stdout.split())
