"""`lantern-rt verify` on bundles whose arrays or graphs are not what the checkpoint has, or not what they should be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from checkpoint_copies import C2I, VQ, changed, config_of
from onnx import TensorProto, external_data_helper

from lantern_rt.bundle.manifest import FileEntry
from lantern_rt.cli.main import run_program

CHECKPOINTS = ["--against", C2I, "--vq", VQ]


def program(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run_program([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def altered(bundle: Path, goal: Path, role: str, edit: Callable[[Path], Any]) -> Path:
    """A copy with one file edited, and the manifest's hash of it renewed."""
    shutil.copytree(bundle, goal)
    manifest = json.loads((goal / "bundle.json").read_text())
    path = goal / manifest["files"][role]["path"]
    edit(path)
    manifest["files"][role] = FileEntry.of(path).model_dump()
    (goal / "bundle.json").write_text(json.dumps(manifest))
    return goal


def add_noise(path: Path) -> None:
    table = np.load(path)
    np.save(path, table + np.float32(1e-3) * np.random.default_rng(0).standard_normal(table.shape, np.float32))


def swap_two(path: Path) -> None:
    arrays = dict(np.load(path))
    arrays["indices"][3, [5, 6]] = arrays["indices"][3, [6, 5]]
    np.savez(path, **arrays)


def stretch(path: Path) -> None:
    arrays = dict(np.load(path))
    np.savez(path, indices=arrays["indices"], distances=arrays["distances"] * np.float32(1.01))


@pytest.mark.parametrize(
    ("role", "edit", "failed"),
    [
        ("code_embeddings", add_noise, {("code_embeddings", "rows")}),
        ("neighbors", swap_two, {("neighbors", "indices")}),
        ("neighbors", stretch, {("neighbors", "distances")}),
    ],
)
def test_an_array_that_is_not_the_checkpoints_fails(
    c2i_bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    role: str,
    edit: Callable[[Path], None],
    failed: set[tuple[str, str]],
) -> None:
    bundle = altered(c2i_bundle, tmp_path / "b", role, edit)
    code, out, _ = program(capsys, "verify", bundle, *CHECKPOINTS, "--json")
    assert code == 2
    assert {(row["graph"], row["tensor"]) for row in json.loads(out)["tensors"] if not row["passed"]} == failed


def test_another_tokenizer_file_fails(anole_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = altered(anole_bundle, tmp_path / "b", "tokenizer", lambda path: path.write_text(path.read_text() + " "))
    data = C2I.parent.parent
    files = ["--vq", data / "chameleon-vqgan", "--drafter", data / "anole/drafter", "--json"]
    code, out, _ = program(capsys, "verify", bundle, "--against", data / "anole/target", *files)
    assert code == 2
    assert [row["graph"] for row in json.loads(out)["tensors"] if not row["passed"]] == ["tokenizer"]


def fewer_layers(folder: Path) -> list[object]:
    weights = torch.load(C2I, weights_only=True)["model"]
    torch.save({name: one for name, one in weights.items() if not name.startswith("layers.2.")}, folder / "other.pt")
    return ["--against", folder / "other.pt", "--vq", VQ]


def more_classes(folder: Path) -> list[object]:
    weights = torch.load(C2I, weights_only=True)["model"]
    weights["cls_embedding.embedding_table.weight"] = torch.ones(14, 64)
    torch.save(weights, folder / "other.pt")
    return ["--against", folder / "other.pt", "--vq", VQ]


def larger_block(folder: Path) -> list[object]:
    config = changed(config_of(C2I), folder / "config.json", block_size=25)
    return [*CHECKPOINTS, "--config", config]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (fewer_layers, "other.pt: target.num_layers: found 2, but the bundle has 3; give the checkpoint that it was"),
        (more_classes, "other.pt: condition.classes: found 13, but the bundle has 10; give the checkpoint"),
        (larger_block, "config.json: block_size tells of a grid of 5, but 4 was asked for; leave one out"),
    ],
)
def test_a_checkpoint_of_other_sizes_is_refused_in_one_line(
    c2i_bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    other: Callable[[Path], list[object]],
    words: str,
) -> None:
    code, _, err = program(capsys, "verify", c2i_bundle, *other(tmp_path))
    assert code == 2
    *progress, line = err.splitlines()
    assert progress[0] == "reading checkpoints"
    assert all(said.startswith("reading ") for said in progress)
    assert words in line


def edit_model(change: Callable[[onnx.ModelProto], Any]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        model = onnx.load(path, load_external_data=False)
        change(model)
        path.write_bytes(model.SerializeToString())

    return edit


def first_weight(model: onnx.ModelProto) -> TensorProto:
    return next(one for one in model.graph.initializer if len(one.dims) == 2)


DAMAGE: dict[str, Callable[[onnx.ModelProto], Any]] = {
    "an operator that is unknown": lambda model: setattr(model.graph.node[0], "op_type", "Nothing"),
    "a missing input": lambda model: model.graph.node[0].input.__setitem__(0, "nowhere"),
    "no operators": lambda model: model.graph.ClearField("node"),
    "no outputs": lambda model: model.graph.ClearField("output"),
    "a name in another language": lambda model: setattr(model.graph.node[0], "domain", "not.there"),
    "an operator set of the future": lambda model: setattr(model.opset_import[0], "version", 4000),
    "a weight of another size": lambda model: first_weight(model).dims.__setitem__(0, 7),
    "a weight of an unknown type": lambda model: setattr(first_weight(model), "data_type", 99),
    "a weight of negative size": lambda model: first_weight(model).dims.__setitem__(0, -5),
    "an input of an unknown type": lambda model: setattr(
        model.graph.input[0].type.tensor_type, "elem_type", TensorProto.STRING
    ),
    "an endless input": lambda model: setattr(model.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", 1 << 50),
    "no inputs": lambda model: model.graph.ClearField("input"),
    "a cycle": lambda model: model.graph.node[0].input.append(model.graph.node[-1].output[0]),
}


@pytest.mark.parametrize("against", [[], CHECKPOINTS], ids=["reference", "checkpoint"])
@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_graph_ends_in_one_line_with_its_name(
    c2i_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, against: list[object]
) -> None:
    bundle = altered(c2i_bundle, tmp_path / "b", "condition", edit_model(DAMAGE[what]))
    code, _, err = program(capsys, "verify", bundle, *against)
    assert code == 2
    line = err.splitlines()[-1]
    assert line.startswith(f"lantern-rt: {bundle}/condition.onnx: expected a graph that runs")
    assert len(line) < 600


@pytest.mark.parametrize("against", [[], CHECKPOINTS], ids=["reference", "checkpoint"])
@pytest.mark.parametrize(
    ("key", "value"), [("offset", "9999999999"), ("length", "-4"), ("offset", "x"), ("length", "9")]
)
def test_damaged_external_data_end_in_one_line_with_the_graphs_name(
    c2i_bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    key: str,
    value: str,
    against: list[object],
) -> None:
    def edit(path: Path) -> None:
        model = onnx.load(path)
        weight = first_weight(model)
        external_data_helper.set_external_data(weight, "class.data", **{"offset": 0, "length": len(weight.raw_data)})
        (path.parent / "class.data").write_bytes(weight.raw_data)
        weight.ClearField("raw_data")
        next(entry for entry in weight.external_data if entry.key == key).value = value
        path.write_bytes(model.SerializeToString())

    bundle = altered(c2i_bundle, tmp_path / "b", "condition", edit)
    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest["files"]["condition.data"] = FileEntry.of(bundle / "class.data").model_dump()
    (bundle / "bundle.json").write_text(json.dumps(manifest))
    code, _, err = program(capsys, "verify", bundle, *against)
    assert code == 2
    assert err.splitlines()[-1].startswith(f"lantern-rt: {bundle}/condition.onnx: expected a graph that runs")


def test_what_a_bundle_says_of_itself_does_not_reach_the_terminal_through_verify(
    c2i_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\u2066\r"
    bundle = altered(c2i_bundle, tmp_path / "b", "code_embeddings", add_noise)
    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest |= {"name": hostile, "provenance": manifest["provenance"] | {"licence": hostile, "exporter": hostile}}
    (bundle / "bundle.json").write_text(json.dumps(manifest))
    for arguments in ([], CHECKPOINTS, ["--json"]):
        code, out, err = program(capsys, "verify", bundle, *arguments)
        assert code in (0, 2)
        assert all(one.isprintable() or one == "\n" for one in out + err), arguments
