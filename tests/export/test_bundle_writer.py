"""Tests of the writer of bundles, which writes a complete bundle or nothing, and does not overwrite other files."""

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
from refusals import catch_error
from torch import Tensor, nn

from lantern_rt.bundle.files import open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.engines.contracts import TensorSpec
from lantern_rt.errors import OutputError, ParityError, RequestError
from lantern_rt.export.graph.graphs import Graph, make_target_graph, name_test_cases
from lantern_rt.export.model import BundleContents
from lantern_rt.export.models.decoder import Decoder, DecoderConfig
from lantern_rt.export.writer import export_model
from lantern_rt.output.files import write_folder_atomically

CONFIG = DecoderConfig(
    hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=8, vocab_size=16, grid=2, prefix=1
)
C2I = DATA / "llamagen-c2i/c2i_tiny.pt"
VQ = DATA / "llamagen-vq/vq_tiny.pt"


class LookupTable(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, *shape))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids]


class ConditionModule(nn.Module):
    """Module of a condition graph: one prefix embedding for each class, and zeros as unconditional embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = LookupTable(1, 8)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        prefix = self.rows(ids)
        return prefix, torch.zeros_like(prefix)


def make_model() -> BundleContents:
    torch.manual_seed(0)
    decoder = Decoder(CONFIG).eval()
    table = torch.randn(16, 8)
    outputs = tuple(TensorSpec(name, ("float32",), ("rows", 1, 8)) for name in ("prefix_embeds", "uncond_embeds"))
    ids = name_test_cases({"class_ids": np.array([1, 2])}, {"class_ids": np.array([3])})
    codes = name_test_cases({"codes": np.array([[1], [2]])})
    class_ids = (TensorSpec("class_ids", ("int64",), ("rows",)),)
    image = (TensorSpec("image", ("float32",), ("images", 1, 4)),)
    return BundleContents(
        graphs=[
            make_target_graph(decoder, table),
            Graph("condition", ConditionModule().eval(), class_ids, outputs, ids),
            Graph("vq_decoder", LookupTable(4).eval(), (TensorSpec("codes", ("int64",), ("images", 1)),), image, codes),
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
            "target": CONFIG.make_target_spec(),
            "condition": {"kind": "class", "prefix": 1, "classes": 16},
            "sampling": {},
            "decoding": {},
        },
    )


def test_pytorch_modules_are_exported_as_a_complete_bundle(tmp_path: Path) -> None:
    stages: list[str] = []
    folder = export_model(make_model(), tmp_path / "toy", progress=lambda stage, done, _: done or stages.append(stage))
    bundle = open_bundle(folder)
    assert bundle.manifest.neighbors == 15
    assert bundle.path("notes").read_bytes() == b"hello"
    assert bundle.code_embeddings.shape == (16, 8)
    assert bundle.neighbor_table.shape == (16, 15)
    assert [p.name for p in tmp_path.iterdir()] == ["toy"]
    assert stages[:4] == ["preparing graphs", "sorting neighbours", "writing target.onnx (MB)", "comparing target.onnx"]


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    output = tmp_path / "toy"
    output.mkdir()
    with pytest.raises(OutputError, match=r"already exists.*--force"):
        export_model(make_model(), output)
    assert list(output.iterdir()) == []


def test_force_replaces_a_bundle_and_nothing_else(tmp_path: Path) -> None:
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


def test_a_failed_export_deletes_the_parent_folders_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# Starts to write a bundle, prints a line and waits until a signal ends the process.
INTERRUPTED_PROGRAM = """
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


@pytest.mark.parametrize(
    ("signal_number", "exit_code", "files_remain"), [(signal.SIGTERM, 143, False), (signal.SIGKILL, -9, True)]
)
def test_files_of_terminated_and_killed_exports_are_deleted(
    tmp_path: Path, signal_number: signal.Signals, exit_code: int, files_remain: bool
) -> None:
    output = tmp_path / "bundles/toy"
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED_PROGRAM, str(output)], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"half-written\n"
        (partial_folder,) = (tmp_path / "bundles").iterdir()
        unrelated = tmp_path / "bundles/.other.x.partial"
        unrelated.mkdir()
        with write_folder_atomically(output, False, "bundle.json"):
            assert partial_folder.is_dir()  # not deleted, since the program that writes the folder still runs
        shutil.rmtree(output)
        program.send_signal(signal_number)
        assert program.wait() == exit_code
    assert partial_folder.is_dir() == files_remain
    export_model(make_model(), output)
    assert {path.name for path in (tmp_path / "bundles").iterdir()} == {"toy", unrelated.name}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ParityError("differs"), RuntimeError("bug")])
@pytest.mark.parametrize("failing_function", ["check_graph_parity", "FileEntry.from_file"])
def test_a_failed_export_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, failing_function: str
) -> None:
    monkeypatch.setattr(f"lantern_rt.export.writer.{failing_function}", raise_error(error))
    with pytest.raises(type(error)):
        export_model(make_model(), tmp_path / "toy")
    assert list(tmp_path.iterdir()) == []


def test_progress_reports_every_stage_up_to_its_total(tmp_path: Path) -> None:
    amounts: dict[str, list[tuple[int, int]]] = {}
    model = replace(make_model(), sources=[("target", C2I)])
    export_model(
        model, tmp_path / "toy", progress=lambda stage, done, total: amounts.setdefault(stage, []).append((done, total))
    )
    files = [f"{role}.onnx" for role in ("target", "condition", "vq_decoder")]
    assert amounts["preparing graphs"] == [(done, 3) for done in range(4)]
    file_stages = {f"{verb} {file}{unit}" for file in files for verb, unit in (("writing", " (MB)"), ("comparing", ""))}
    other_stages = {"preparing graphs", "sorting neighbours", "hashing checkpoints (MB)", "hashing files (MB)"}
    assert amounts.keys() == file_stages | other_stages
    for counts in amounts.values():
        assert counts == sorted(counts)
        assert counts[0][0] == 0
        assert counts[-1][0] == counts[-1][1] > 0
    assert amounts["comparing target.onnx"] == [(done, 15) for done in range(16)]


def test_an_export_to_a_full_disk_is_rejected_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))  # 1 byte free
    with pytest.raises(OutputError, match=r"found 0\.00 GB free on the disk, expected 0\.00 GB"):
        export_model(make_model(), tmp_path / "toy")
    assert list(tmp_path.iterdir()) == []


def test_an_export_beyond_the_memory_is_rejected_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lantern_rt.engines.host.available_memory", lambda: 10)  # bytes
    error = catch_error(RequestError, export_model, make_model(), tmp_path / "toy")
    assert (error.field, error.found) == ("memory", "0.0 GB free")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_replacement_leaves_the_old_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = export_model(make_model(), tmp_path / "toy")
    digest = open_bundle(output).digest
    rename = Path.rename

    def fail_for_new_folder(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_new_folder)
    with pytest.raises(OutputError, match="No space left"):
        export_model(make_model(), output, force=True)
    assert open_bundle(output).digest == digest
    assert [p.name for p in tmp_path.iterdir()] == ["toy"]


def test_a_bundle_folder_has_ordinary_permissions(tmp_path: Path) -> None:
    output = export_model(make_model(), tmp_path / "toy")
    (tmp_path / "ordinary").mkdir()
    assert output.stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_an_existing_output_is_rejected_before_reading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "junk.pt").write_bytes(b"junk")
    command = ["export", "--target", str(tmp_path / "junk.pt"), "--vq", str(VQ), "--output", str(tmp_path)]
    assert run_program(command) == 2
    assert "already exists" in capsys.readouterr().err


def test_the_manifest_names_checkpoints_and_default_settings(t2i_drafter_bundle: Path, c2i_bundle: Path) -> None:
    manifest = open_bundle(t2i_drafter_bundle).manifest
    roles = ["target", "config", "vq", "drafter_config", "drafter"]
    assert [source.role for source in manifest.provenance.sources] == roles
    assert next(method for method in manifest.decoding.methods if method.method == "lantern").neighbors == 127
    assert (manifest.sampling.cfg_scale, manifest.sampling.top_k) == (7.5, 1000)
    manifest_without_drafter = open_bundle(c2i_bundle).manifest
    assert (manifest_without_drafter.decoding.methods, manifest_without_drafter.drafter) == ((), None)
    sampling = manifest_without_drafter.sampling
    assert (sampling.cfg_scale, sampling.top_k) == (4.0, 0)
    assert (manifest_without_drafter.image_height, manifest_without_drafter.condition.classes) == (64, 10)
