"""Bundles appear whole or not at all, and never over something else."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from goldens import DATA
from refusals import error_of
from torch import Tensor, nn

from lantern_rt.bundle.files import open_bundle
from lantern_rt.bundle.manifest import DecoderSpec
from lantern_rt.cli.main import run_program
from lantern_rt.errors import OutputError, ParityError, RequestError
from lantern_rt.export.graph.graphs import Graph, make_target_graph, name_test_cases
from lantern_rt.export.graph.onnx_ops import TensorSpec
from lantern_rt.export.model import BundleContents
from lantern_rt.export.models.decoder import Decoder, DecoderConfig, get_decoder_spec_fields
from lantern_rt.export.writer import export_model
from lantern_rt.output.files import write_folder_atomically

CONFIG = DecoderConfig(
    hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=8, vocab_size=16, grid=2, prefix=1
)
C2I = DATA / "llamagen-c2i/c2i_tiny.pt"
VQ = DATA / "llamagen-vq/vq_tiny.pt"


class Rows(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, *shape))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids]


class Prefixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = Rows(1, 8)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        prefix = self.rows(ids)
        return prefix, torch.zeros_like(prefix)


def make_model() -> BundleContents:
    torch.manual_seed(0)
    decoder = Decoder(CONFIG).eval()
    table = torch.randn(16, 8)
    outputs = tuple(TensorSpec(name, ("rows", 1, 8)) for name in ("prefix_embeds", "uncond_embeds"))
    ids = name_test_cases({"class_ids": np.array([1, 2])}, {"class_ids": np.array([3])})
    codes = name_test_cases({"codes": np.array([[1], [2]])})
    class_ids = (TensorSpec("class_ids", ("rows",), "int64"),)
    picture = (TensorSpec("image", ("images", 1, 4)),)
    return BundleContents(
        graphs=[
            make_target_graph(decoder, table),
            Graph("condition", Prefixes().eval(), class_ids, outputs, ids),
            Graph("vq_decoder", Rows(4).eval(), (TensorSpec("codes", ("images", 1), "int64"),), picture, codes),
        ],
        code_embeddings=table,
        codebook=table.numpy(),
        extra_files={"notes": ("notes.txt", b"hello")},
        manifest_fields={
            "name": "toy",
            "family": "toy",
            "grid_rows": 2,
            "grid_columns": 2,
            "codebook_size": 16,
            "image_height": 4,
            "image_width": 4,
            "target": DecoderSpec(**get_decoder_spec_fields(CONFIG), max_positions=CONFIG.num_rope_positions),
            "condition": {"kind": "class", "prefix": 1, "classes": 16},
            "sampling": {},
            "decoding": {},
        },
    )


def test_any_modules_become_a_bundle_that_opens(tmp_path: Path) -> None:
    stages: list[str] = []  # stages, each when it begins
    folder = export_model(make_model(), tmp_path / "toy", progress=lambda what, done, _: done or stages.append(what))
    bundle = open_bundle(folder)
    assert bundle.manifest.neighbors == 15
    assert bundle.path("notes").read_bytes() == b"hello"
    assert bundle.code_embeddings.shape == (16, 8)
    assert bundle.neighbor_table.shape == (16, 15)
    assert [p.name for p in tmp_path.iterdir()] == ["toy"]
    assert stages[:4] == ["preparing graphs", "sorting neighbours", "writing target.onnx (MB)", "comparing target.onnx"]


def test_the_same_parts_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = (open_bundle(export_model(make_model(), tmp_path / name)) for name in ("one", "two"))
    assert first.digest == second.digest


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    output = tmp_path / "toy"
    output.mkdir()
    with pytest.raises(OutputError, match=r"already exists.*--force"):
        export_model(make_model(), output)
    assert list(output.iterdir()) == []


def test_force_replaces_a_bundle_but_nothing_else(tmp_path: Path) -> None:
    output = export_model(make_model(), tmp_path / "toy")
    (output / "old").touch()
    export_model(make_model(), output, force=True)
    assert not (output / "old").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["toy"]
    for unrelated in (tmp_path / "letters", tmp_path / "file"):
        unrelated.write_text("dear") if unrelated.name == "file" else unrelated.mkdir()
        (unrelated / "a.txt").write_text("dear") if unrelated.is_dir() else None
        with pytest.raises(OutputError, match=r"has no bundle\.json, so --force does not replace it"):
            export_model(make_model(), unrelated, force=True)
    assert (tmp_path / "letters/a.txt").read_text() == "dear"


def test_folders_around_a_bundle_are_made_and_vanish_if_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_bundle(export_model(make_model(), tmp_path / "bundles/large/toy"))
    monkeypatch.setattr("lantern_rt.export.writer.check_graph_parity", raise_error(ParityError("differs")))
    with pytest.raises(ParityError):
        export_model(make_model(), tmp_path / "bundles/small/toy")
    assert [path.name for path in (tmp_path / "bundles").iterdir()] == ["large"]
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="Not a directory"):
        export_model(make_model(), tmp_path / "file/inside/toy")


def raise_error(error: BaseException) -> Callable[..., None]:
    def raiser(*_: object, **__: object) -> None:
        raise error

    return raiser


KILLED = """
import sys, time
from pathlib import Path
from lantern_rt.cli import main as program
from lantern_rt.output.files import write_folder_atomically

def write(arguments):
    with write_folder_atomically(Path(*arguments), False, "bundle.json"):
        print("half-written", flush=True)
        time.sleep(60)

program.run_program = write
program.main(sys.argv[1:])
"""


@pytest.mark.parametrize(("number", "code", "stays"), [(signal.SIGTERM, 143, 0), (signal.SIGKILL, -9, 1)])
def test_a_terminated_export_leaves_nothing_and_a_killed_one_until_the_next(
    tmp_path: Path, number: signal.Signals, code: int, stays: int
) -> None:
    output = tmp_path / "bundles/toy"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(output)], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"half-written\n"
        (partial,) = (tmp_path / "bundles").iterdir()
        unrelated = tmp_path / "bundles/.other.x.partial"
        unrelated.mkdir()
        with write_folder_atomically(output, False, "bundle.json"):
            assert partial.is_dir()  # the folder of the running program
        shutil.rmtree(output)
        program.send_signal(number)
        assert program.wait() == code
    assert partial.is_dir() == bool(stays)
    export_model(make_model(), output)
    assert {path.name for path in (tmp_path / "bundles").iterdir()} == {"toy", unrelated.name}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ParityError("differs"), RuntimeError("bug")])
@pytest.mark.parametrize("step", ["check_graph_parity", "FileEntry.from_file"])
def test_nothing_half_written_stays_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, step: str
) -> None:
    monkeypatch.setattr(f"lantern_rt.export.writer.{step}", raise_error(error))
    with pytest.raises(type(error)):
        export_model(make_model(), tmp_path / "toy")
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_everything_that_may_take_long(tmp_path: Path) -> None:
    amounts: dict[str, list[tuple[int, int]]] = {}
    model = replace(make_model(), sources=[("target", C2I)])
    export_model(
        model, tmp_path / "toy", progress=lambda what, done, total: amounts.setdefault(what, []).append((done, total))
    )
    files = [f"{role}.onnx" for role in ("target", "condition", "vq_decoder")]
    assert amounts["preparing graphs"] == [(done, 3) for done in range(4)]
    expected = {f"{work} {file}{unit}" for file in files for work, unit in (("writing", " (MB)"), ("comparing", ""))}
    others = {"preparing graphs", "sorting neighbours", "hashing checkpoints (MB)", "hashing files (MB)"}
    assert amounts.keys() == others | expected
    for counts in amounts.values():
        assert counts == sorted(counts)
        assert counts[0][0] == 0
        assert counts[-1][0] == counts[-1][1] > 0
    assert amounts["comparing target.onnx"] == [(done, 15) for done in range(16)]


def test_a_disk_that_is_too_full_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with pytest.raises(OutputError, match=r"found 0\.00 GB free on the disk, expected 0\.00 GB"):
        export_model(make_model(), tmp_path / "toy")
    assert list(tmp_path.iterdir()) == []


def test_a_machine_with_too_little_memory_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lantern_rt.engines.host.available_memory", lambda: 10)
    error = error_of(RequestError, export_model, make_model(), tmp_path / "toy")
    assert (error.field, error.found) == ("memory", "0.0 GB free")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_replacement_leaves_the_old_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = export_model(make_model(), tmp_path / "toy")
    digest = open_bundle(output).digest
    rename = Path.rename

    def fails_for_new(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_for_new)
    with pytest.raises(OutputError, match="No space left"):
        export_model(make_model(), output, force=True)
    assert open_bundle(output).digest == digest
    assert [p.name for p in tmp_path.iterdir()] == ["toy"]


def test_a_bundle_can_be_read_by_others(tmp_path: Path) -> None:
    output = export_model(make_model(), tmp_path / "toy")
    (tmp_path / "plain").mkdir()
    assert output.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_export_rejects_what_is_there_before_reading_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["export", "--target", str(tmp_path / "absent.pt"), "--vq", str(VQ), "--output", str(tmp_path)]
    assert run_program(command) == 2
    assert "already exists" in capsys.readouterr().err


def test_the_manifest_tells_where_a_bundle_came_from(t2i_drafter_bundle: Path, c2i_bundle: Path) -> None:
    manifest = open_bundle(t2i_drafter_bundle).manifest
    roles = ["target", "config", "vq", "drafter_config", "drafter"]
    assert [source.role for source in manifest.provenance.sources] == roles
    assert next(method for method in manifest.decoding.methods if method.method == "lantern").neighbors == 127
    assert (manifest.sampling.cfg_scale, manifest.sampling.top_k) == (7.5, 1000)
    undrafted = open_bundle(c2i_bundle).manifest
    assert (undrafted.decoding.methods, undrafted.drafter) == ((), None)
    assert (undrafted.sampling.cfg_scale, undrafted.sampling.top_k) == (4.0, 0)
    assert (undrafted.image_height, undrafted.condition.classes) == (64, 10)
