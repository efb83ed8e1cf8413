"""Reading checkpoints is told of in bytes, through every family's readers, to whoever listens and nobody else."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from llamagen_golden import DATA

from lantern_rt.cli import console
from lantern_rt.cli.families import Checkpoints, read_family
from lantern_rt.cli.main import run_program
from lantern_rt.export.checkpoints.files import read_weights
from lantern_rt.export.checkpoints.folders import read_checkpoint
from lantern_rt.export.progress import count_megabytes, telling

C2I, VQ = DATA / "llamagen-c2i/c2i_tiny.pt", DATA / "llamagen-vq/vq_tiny.pt"
T2I, DRAFTER = DATA / "llamagen-t2i/t2i_tiny.pt", DATA / "lantern-drafter-llamagen"
Told = list[tuple[str, int, int]]


def test_the_bytes_of_a_file_are_counted_once_even_where_weights_share_numbers(tmp_path: Path) -> None:
    table = torch.arange(100_000.0)
    torch.save({"a": table, "b": table, "c": table[:5].clone()}, tmp_path / "a.pt")
    counted: list[int] = []
    read_weights(tmp_path / "a.pt", counted.append)
    size = (tmp_path / "a.pt").stat().st_size
    assert counted[0] == table.nbytes
    assert (len(counted), min(counted), sum(counted)) == (4, 0, size)


def test_megabytes_rise_from_nothing_to_all_of_them() -> None:
    told: Told = []
    count = count_megabytes("reading a.pt", 2_500_000, lambda *one: told.append(one))
    for size in (1, 1_999_999, 500_000):
        count(size)
    assert told == [("reading a.pt (MB)", done, 3) for done in (0, 1, 2, 3)]


def test_files_of_a_folder_are_one_thing_to_read(tmp_path: Path) -> None:
    for i in range(3):
        torch.save({str(i): torch.zeros(500_000)}, tmp_path / f"{i}.pt")
    told: Told = []
    with telling(lambda *one: told.append(one)):
        read_checkpoint(tmp_path)
    assert {(what, total) for what, _, total in told} == {(f"reading {tmp_path.name} (MB)", 7)}
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert {done for _, done, _ in told} >= {0, 3, 5, 7}
    before = len(told)
    read_checkpoint(tmp_path)
    assert len(told) == before, "nobody listens any more"


@pytest.mark.parametrize(
    ("family", "given", "names"),
    [
        ("llamagen", Checkpoints(C2I, VQ, config=C2I.with_name("config.json")), ["c2i_tiny.pt", "vq_tiny.pt"]),
        (
            "llamagen",
            Checkpoints(T2I, VQ, DRAFTER, config=T2I.with_name("config.json")),
            ["t2i_tiny.pt", "vq_tiny.pt", "lantern-drafter-llamagen"],
        ),
        (
            "anole",
            Checkpoints(DATA / "anole/target", DATA / "chameleon-vqgan", DATA / "anole/drafter"),
            ["vqgan.ckpt", "target", "drafter"],
        ),
    ],
)
def test_every_checkpoint_of_a_family_is_read_with_amounts(family: str, given: Checkpoints, names: list[str]) -> None:
    told: Told = []
    read_family(family, given, lambda *one: told.append(one))
    assert told[0] == ("reading checkpoints", 0, 0)
    assert list(dict.fromkeys(what for what, _, _ in told[1:])) == [f"reading {name} (MB)" for name in names]
    ends = {what: (done, total) for what, done, total in told[1:]}
    assert all(done == total > 0 for done, total in ends.values())


@pytest.mark.parametrize("command", ["export", "verify"])
def test_off_a_terminal_reading_is_a_line_with_its_amounts(
    c2i_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr(console, "QUIET", 0.001)
    monkeypatch.setattr(console, "EVERY", 0.001)
    look = torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda weight: (time.sleep(0.002), look(weight))[1])  # as if it were large
    common = ["--vq", str(VQ), "--config", str(C2I.with_name("config.json"))]
    given = {"export": ["--target", str(C2I), "--output", str(tmp_path / "out")]}
    given["verify"] = [str(c2i_bundle), "--against", str(C2I)]
    assert run_program([command, *given[command], *common]) == 0
    heard = capsys.readouterr().err
    assert re.search(r"^reading vq_tiny\.pt \(MB\): \d of \d", heard, re.MULTILINE), heard
