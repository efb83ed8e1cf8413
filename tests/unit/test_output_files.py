"""Writing beside files of strangers: nothing is waited for, followed or removed that this user did not make."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusals import error_of

from lantern_rt.errors import OutputError
from lantern_rt.output.files import (
    check_disk_space,
    check_new_folder,
    check_output_path,
    replace_file,
    write_folder_atomically,
    write_output,
)
from lantern_rt.output.names import choose_output_paths


def write_folder(output: Path) -> None:
    with write_folder_atomically(output, False, "bundle.json") as folder:
        (folder / "bundle.json").touch()


def test_pipes_links_and_folders_of_others_beside_the_goal_are_left(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".goal.pipe.partial")
    (tmp_path / "own").mkdir()
    (tmp_path / ".goal.link.partial").symlink_to(tmp_path / "own")
    (tmp_path / ".goal.killed.partial").mkdir()
    names = {".goal.pipe.partial", ".goal.link.partial", "goal", "own"}
    if not os.geteuid():  # only root can give a folder away
        (tmp_path / ".goal.theirs.partial").mkdir()
        os.chown(tmp_path / ".goal.theirs.partial", 12345, -1)
        names.add(".goal.theirs.partial")
    write_folder(tmp_path / "goal")
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_file_grows_in_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 7)
    monkeypatch.setattr("threading.get_ident", lambda: 8)
    (tmp_path / "precious").write_text("precious")
    partial = tmp_path / ".a.png.7.8.partial"
    if kind == "pipe":
        os.mkfifo(partial)
    else:
        partial.symlink_to(tmp_path / "precious")
    replace_file(tmp_path / "a.png", b"picture")
    assert (tmp_path / "precious").read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "precious"}


@pytest.mark.parametrize("target", ["nowhere", "a.png"], ids=["to nowhere", "in a circle"])
def test_a_link_counts_as_a_file_wherever_it_leads(tmp_path: Path, target: str) -> None:
    link = tmp_path / "a.png"
    link.symlink_to(tmp_path / target)
    for refuse in (
        lambda: check_output_path(link, False),
        lambda: write_output(link, b"", False),
        lambda: choose_output_paths(str(link), ["a"], False),
    ):
        assert error_of(OutputError, refuse).field == str(link)
    assert choose_output_paths(str(tmp_path), ["a"], False) == [(tmp_path / "a-2.png", False)]
    check_output_path(link, True)
    write_output(link, b"picture", True)
    assert not link.is_symlink()
    assert not (tmp_path / "nowhere").exists()


def test_a_mount_point_is_rejected_before_the_work() -> None:
    error = error_of(OutputError, check_new_folder, Path("/"), True, "bundle.json")
    assert (error.problem, error.remedy) == (
        "is a mount point, which cannot be replaced",
        "give a folder in it, such as /new",
    )


def test_a_folder_to_replace_in_a_folder_without_write_access_is_rejected_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (tmp_path / "bundle").mkdir()
    monkeypatch.setattr("tempfile.TemporaryFile", fail)
    error = error_of(OutputError, check_new_folder, tmp_path / "bundle", True, "bundle.json")
    assert error.problem == "cannot be written (Read-only file system)"


def test_folders_on_one_disk_share_its_room_and_others_have_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_of = {"one": 1, "two": 1, "three": 3}
    for name in disk_of:
        (tmp_path / name).mkdir()
    monkeypatch.setattr("lantern_rt.output.files.shutil.disk_usage", lambda _: SimpleNamespace(free=10**10))
    monkeypatch.setattr(Path, "stat", lambda path, **_: SimpleNamespace(st_dev=disk_of[path.name]))
    check_disk_space([(tmp_path / "one", 6 * 10**9), (tmp_path / "three", 6 * 10**9)], "")
    needed = [(tmp_path / name, 6 * 10**9) for name in ("three", "one", "two")]
    error = error_of(OutputError, check_disk_space, needed, "free some")
    assert (error.field, error.expected) == (str(tmp_path / "one"), "12.00 GB")
