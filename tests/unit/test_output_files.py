"""Writing output files in folders with links, pipes and files of other users, which must stay unchanged."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusals import catch_error

from lantern_rt.engines.host import check_space
from lantern_rt.errors import OutputError
from lantern_rt.output.files import (
    check_new_folder,
    check_output_path,
    lock_folder,
    replace_file,
    write_folder_atomically,
    write_output,
)
from lantern_rt.output.names import choose_output_paths


def write_folder(output: Path) -> None:
    with write_folder_atomically(output, False, "bundle.json") as folder:
        (folder / "bundle.json").touch()


def test_writing_removes_only_the_users_partial_folders(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".goal.pipe.partial")
    (tmp_path / "own").mkdir()
    (tmp_path / ".goal.link.partial").symlink_to(tmp_path / "own")
    (tmp_path / ".goal.killed.partial").mkdir()  # left by a killed process of this user
    names = {".goal.pipe.partial", ".goal.link.partial", "goal", "own"}
    if not os.geteuid():  # only root can change the owner of a folder
        (tmp_path / ".goal.theirs.partial").mkdir()
        os.chown(tmp_path / ".goal.theirs.partial", 12345, -1)
        names.add(".goal.theirs.partial")
    write_folder(tmp_path / "goal")
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_pipe_or_link_named_like_a_partial_file_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 7)
    monkeypatch.setattr("threading.get_ident", lambda: 8)
    (tmp_path / "precious").write_text("precious")
    partial = tmp_path / ".a.png.7.8.partial"
    if kind == "pipe":
        os.mkfifo(partial)
    else:
        partial.symlink_to(tmp_path / "precious")
    replace_file(tmp_path / "a.png", b"image")
    assert (tmp_path / "precious").read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "precious"}


@pytest.mark.parametrize("target", ["nowhere", "a.png"], ids=["to a missing file", "to itself"])
def test_a_broken_link_is_not_overwritten_without_force(tmp_path: Path, target: str) -> None:
    link = tmp_path / "a.png"
    link.symlink_to(tmp_path / target)
    for try_output_path in (
        lambda: check_output_path(link, False),
        lambda: write_output(link, b"", False),
        lambda: choose_output_paths(str(link), ["a"], False),
    ):
        assert catch_error(OutputError, try_output_path).field == str(link)
    assert choose_output_paths(str(tmp_path), ["a"], False) == [(tmp_path / "a-2.png", False)]
    check_output_path(link, True)
    write_output(link, b"image", True)
    assert not link.is_symlink()
    assert not (tmp_path / "nowhere").exists()


def test_a_mount_point_as_output_is_rejected_before_the_work() -> None:
    error = catch_error(OutputError, check_new_folder, Path("/"), True, "bundle.json")
    assert error.problem == "is a mount point, which cannot be replaced"
    assert error.remedy == "give a folder in it, such as /new"


@pytest.mark.parametrize(
    ("function", "number"), [("tempfile.TemporaryFile", errno.EROFS), ("pathlib.Path.iterdir", errno.EACCES)]
)
def test_an_unusable_output_is_rejected_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, number: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / "bundle").mkdir()
    monkeypatch.setattr(function, fail)
    error = catch_error(OutputError, check_new_folder, tmp_path / "bundle", True, "bundle.json")
    assert error.problem == f"cannot be written ({os.strerror(number)})"


def test_the_disk_check_adds_folders_on_the_same_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_of = {"one": 1, "two": 1, "three": 3}
    for name in disk_of:
        (tmp_path / name).mkdir()
    monkeypatch.setattr("lantern_rt.engines.host.shutil.disk_usage", lambda _: SimpleNamespace(free=10**10))
    monkeypatch.setattr(Path, "stat", lambda path, **_: SimpleNamespace(st_dev=disk_of[path.name]))
    check_space(0, [(tmp_path / "one", 6 * 10**9), (tmp_path / "three", 6 * 10**9)])
    needed = [(tmp_path / name, 6 * 10**9) for name in ("three", "one", "two")]
    error = catch_error(OutputError, check_space, 0, needed)
    assert (error.field, error.expected) == (str(tmp_path / "one"), "12.00 GB")


def test_a_second_lock_of_a_folder_waits_for_the_first(tmp_path: Path) -> None:
    with ExitStack() as first:
        assert first.enter_context(lock_folder(tmp_path))
        with lock_folder(tmp_path) as locked:
            assert not locked
        with lock_folder(tmp_path, report_wait=first.close) as locked:
            assert locked


def test_disks_without_locks_are_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", fail)
    with lock_folder(tmp_path) as locked:
        assert not locked
