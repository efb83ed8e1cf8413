"""Command `lantern-rt verify`, which compares a bundle with checkpoints or with ONNX's reference evaluator."""

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
from bundle_folder import write_bundle_manifest
from checkpoint_copies import (
    ANOLE,
    ANOLE_DRAFTER,
    C2I,
    DRAFTER,
    EMU35,
    EMU35_VQ,
    GLM_IMAGE,
    JANUS,
    LUMINA2,
    MOVQGAN,
    T2I,
    VQ,
    VQGAN,
    Edit,
    Weights,
    config_path,
    copy_as_shards,
    copy_checkpoint,
    copy_json,
    copy_weights,
)
from goldens import DATA
from onnx import TensorProto, external_data_helper

from lantern_rt import Pipeline
from lantern_rt.bundle.files import open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.export.families import emu35
from lantern_rt.export.registry import FAMILIES
from lantern_rt.export.verify import compare_top_tokens, measure_kl_divergence

# Checkpoints of the small bundles, in the order in which `verify` lists the sources of a bundle.
C2I_FILES = [C2I, VQ, config_path(C2I)]
T2I_FILES = [T2I, VQ, DRAFTER, config_path(T2I)]
ANOLE_FILES = [ANOLE, VQGAN, ANOLE_DRAFTER]
GRAPHS = {"target", "drafter", "condition", "vq_decoder", "vq_encoder"}
TABLES = {"code_embeddings", "neighbors", "tokenizer"}


def run_verify(program: Any, *arguments: object) -> tuple[dict[str, Any], set[tuple[str, str]]]:
    """Run `verify --json`; return the report, and the pairs of graph and tensor that failed."""
    code, out, err = program("verify", *arguments, "--json")
    report = json.loads(out)
    assert code == (0 if report["passed"] else 2), err
    return report, {(row["graph"], row["tensor"]) for row in report["tensors"] if not row["passed"]}


@pytest.fixture(scope="module")
def rounded_bundle(export_once: Any) -> Path:
    def export(output: Path) -> None:
        files = ["--target", T2I, "--vq", VQ, "--config", config_path(T2I), "--drafter", DRAFTER, "--output", output]
        assert run_program(["export", *map(str, files), "--precision", "int8-weights"]) == 0

    path: Path = export_once("rounded/bundle", export)
    return path


def test_the_kl_divergence_of_distributions_is_in_nats() -> None:
    expected = np.log([[0.5, 0.5], [0.25, 0.75]])
    logits = np.log([[0.5, 0.5], [0.5, 0.5]])
    np.testing.assert_allclose(
        measure_kl_divergence(expected, logits + 7), [0, 0.25 * np.log(0.5) + 0.75 * np.log(1.5)], atol=1e-12
    )


def test_almost_equally_probable_top_tokens_agree() -> None:
    expected = np.log([[0.5, 0.45, 0.05], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    logits = np.log([[0.45, 0.5, 0.05], [0.45, 0.5, 0.05], [0.6, 0.3, 0.1]])
    assert compare_top_tokens(expected, logits).tolist() == [True, False, True]


def test_verify_passes_with_the_checkpoints_of_the_export(c2i_bundle: Path, program: Any) -> None:
    code, out, err = program("verify", c2i_bundle, *C2I_FILES)
    assert code == 0, out
    assert out.strip().endswith("passed")
    for name in ("logits", "prefix_embeds", "images", "pre_quant", "new_key_values.2.value"):
        assert name in out
    assert "comparing target.onnx" in err


@pytest.mark.parametrize("precision", ["fp16", "bf16-safe", "int8", "int8-weights", "int4-weights"])
@pytest.mark.parametrize("files", [[JANUS], [EMU35, EMU35_VQ]], ids=["janus", "emu35"])
def test_verify_passes_for_every_precision_of_a_family(
    monkeypatch: pytest.MonkeyPatch, program: Any, files: list[Path], precision: str
) -> None:
    monkeypatch.setattr(emu35, "SIZES", ((4, 5), (5, 3)))
    options = [word for pair in zip(("--target", "--vq"), files, strict=False) for word in pair]
    code, _, err = program("export", *options, "--precision", precision, "--output", "bundle")
    assert code == 0, err
    assert run_verify(program, "bundle", *files)[1] == set()


def test_verify_finds_the_checkpoints_in_a_folder_by_their_names(
    c2i_bundle: Path, tmp_path: Path, program: Any
) -> None:
    for file in C2I_FILES:
        shutil.copy(file, tmp_path)
    assert run_verify(program, c2i_bundle, tmp_path)[1] == set()


def test_verify_detects_a_changed_output_head_of_anole(anole_bundle: Path, tmp_path: Path, program: Any) -> None:
    report, failed = run_verify(program, anole_bundle, *ANOLE_FILES)
    assert not failed
    assert {row["graph"] for row in report["tensors"]} == GRAPHS | TABLES
    assert [row["agreement"] for row in report["distributions"]] == [1.0, 1.0]
    other_target = copy_checkpoint(
        ANOLE, tmp_path / "other", lambda w: w["lm_head.weight"][4].add_(0.1)
    )  # the row of code 0
    _, failed = run_verify(program, anole_bundle, other_target, *ANOLE_FILES[1:])
    assert failed == {("target", "logits"), ("drafter", "logits")}


def check_changes(
    program: Any, bundle: Any, files: list[Path], folder: Path, part: str, weight: str, base: Edit
) -> None:
    """Check that `verify` finds a changed weight, another base of positions, and a shard with another's content."""
    target, *others = files
    changed = shutil.copytree(target, folder / "changed")
    copy_checkpoint(target / part, changed / part, lambda w: w[weight].mul_(1.5))
    assert ("target", "logits") in run_verify(program, bundle, changed, *others)[1]
    copy_checkpoint(target / part, changed / part, config=base)
    code, _, err = program("verify", bundle, changed, *others)
    assert (code, "target.rope_base: found 500.0, expected 10000.0, as the bundle has" in err) == (2, True)
    sharded = folder / "sharded"
    shards = copy_as_shards(target / part, sharded / part)
    if part:
        shutil.copytree(target / "processor", sharded / "processor")
    assert not run_verify(program, bundle, sharded, *others)[1]
    shutil.copy(shards / "model-00001-of-00003.safetensors", shards / "model-00002-of-00003.safetensors")
    code, _, err = program("verify", bundle, sharded, *others)
    assert (code, "does not hold what the index says" in err) == (2, True)


def test_verify_detects_changes_of_a_lumina2_checkpoint(lumina2_bundle: Path, tmp_path: Path, program: Any) -> None:
    report, failed = run_verify(program, lumina2_bundle, LUMINA2, MOVQGAN)
    assert not failed
    assert {row["graph"] for row in report["tensors"]} == GRAPHS - {"drafter"} | TABLES
    weight = "model.layers.1.mlp.up_proj.weight"
    files = [LUMINA2, MOVQGAN]
    check_changes(program, lumina2_bundle, files, tmp_path, "", weight, lambda config: config.update(rope_theta=500.0))


def test_verify_detects_changes_of_a_glm_image_checkpoint(tmp_path: Path, program: Any) -> None:
    assert program("export", "--family", "glm_image", "--target", GLM_IMAGE, "--grid", 2, "--output", "glm")[0] == 0
    report, failed = run_verify(program, "glm", GLM_IMAGE)
    assert not failed
    assert {row["graph"] for row in report["tensors"]} == {"target", "condition", "vq_encoder"} | TABLES
    report, failed = run_verify(program, "glm")
    assert (failed, {row["graph"] for row in report["tensors"]}) == (set(), {"target", "condition", "vq_encoder"})
    scale = "model.language_model.layers.1.post_mlp_layernorm.weight"

    def change_base(config: dict[str, Any]) -> None:
        config["text_config"]["rope_parameters"]["rope_theta"] = 500.0

    check_changes(program, "glm", [GLM_IMAGE], tmp_path, "vision_language_encoder", scale, change_base)


def test_verify_fails_for_a_target_with_changed_weights(c2i_bundle: Path, tmp_path: Path, program: Any) -> None:
    other_target = copy_weights(tmp_path, C2I, lambda w: w["layers.1.feed_forward.w2.weight"][:, 0].add_(0.1))
    _, failed = run_verify(program, c2i_bundle, other_target, *C2I_FILES[1:])
    tensors = {tensor for _, tensor in failed}
    assert {"logits", "hidden_states", "new_key_values.2.key"} <= tensors
    assert "new_key_values.1.key" not in tensors


def test_without_a_checkpoint_the_reference_evaluator_compares(
    rounded_bundle: Path, emu3_bundle: Path, program: Any
) -> None:
    report, failed = run_verify(program, rounded_bundle)
    assert not failed
    assert report["against"] == "ONNX reference evaluator"
    assert {row["graph"] for row in report["tensors"]} == GRAPHS
    assert [row["graph"] for row in report["distributions"]] == ["target", "drafter"]
    report, failed = run_verify(program, emu3_bundle)  # a bundle with several image sizes
    assert not failed
    assert {row["graph"] for row in report["tensors"]} == GRAPHS - {"drafter"}


def test_targets_of_rounded_weights_are_compared_by_kl_divergence(rounded_bundle: Path, program: Any) -> None:
    report, failed = run_verify(program, rounded_bundle, *T2I_FILES)
    assert not failed
    target, drafter = report["distributions"]
    assert 0 < target["mean_divergence"] < target["divergence_limit"] == drafter["divergence_limit"]
    assert all(row["limit"] is None for row in report["tensors"] if row["graph"] == "target")


def test_a_bundle_of_rounded_weights_generates_images(rounded_bundle: Path) -> None:
    manifest = open_bundle(rounded_bundle).manifest
    assert manifest.target.precision == "int8-weights"
    assert manifest.drafter is not None
    assert manifest.drafter.precision == "int8-weights"
    width = manifest.condition.caption_dim or 0
    embeddings = np.random.default_rng(0).standard_normal((5, width), np.float32)
    pipeline = Pipeline.from_bundle(rounded_bundle, threads=1)
    eagle_result, ar_result = (
        pipeline(embeddings=embeddings, seed=3, method=method, temperature=0.0) for method in ("eagle", "ar")
    )
    assert np.array_equal(np.asarray(eagle_result.images[0]), np.asarray(ar_result.images[0]))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([C2I], "checkpoints: found {}, expected target (c2i_tiny.pt), vq (vq_tiny.pt), config (config.json)"),
        ([*C2I_FILES, DRAFTER], "expected target (c2i_tiny.pt), vq (vq_tiny.pt), config (config.json)"),
        ([DATA / "absent.pt", *C2I_FILES[1:]], "absent.pt: no such file"),
    ],
)
def test_verify_rejects_missing_and_additional_checkpoints(
    c2i_bundle: Path, program: Any, files: list[Path], words: str
) -> None:
    code, _, err = program("verify", c2i_bundle, *files)
    assert code == 2
    assert words.format(C2I) in err


def test_verify_rejects_a_bundle_of_an_unknown_family(program: Any) -> None:
    code, _, err = program("verify", "scenes", C2I)
    assert code == 2
    assert f"found a bundle of family 'scenes', expected a bundle of {', '.join(FAMILIES)}" in err


def copy_with_edited_file(bundle: Path, output_path: Path, role: str, edit: Callable[[Path], Any]) -> Path:
    """Copy a bundle, edit a file of the copy, and update the hash in the manifest."""
    shutil.copytree(bundle, output_path)
    manifest = json.loads((output_path / "bundle.json").read_text())
    edit(output_path / manifest["files"][role]["path"])
    if (output_path / "class.data").is_file():  # the file that `move_weight_to_file` writes
        manifest["files"]["class.data"] = {"path": "class.data"}
    write_bundle_manifest(output_path, manifest)
    return output_path


def add_noise(path: Path) -> None:
    table = np.load(path)
    np.save(path, table + np.float32(1e-3) * np.random.default_rng(0).standard_normal(table.shape, np.float32))


def swap_neighbours(path: Path) -> None:
    arrays = dict(np.load(path))
    arrays["indices"][3, [5, 6]] = arrays["indices"][3, [6, 5]]
    np.savez(path, **arrays)


def test_verify_fails_for_changed_code_embeddings_or_neighbours(c2i_bundle: Path, tmp_path: Path, program: Any) -> None:
    bundle = copy_with_edited_file(c2i_bundle, tmp_path / "embeddings", "code_embeddings", add_noise)
    assert run_verify(program, bundle, *C2I_FILES)[1] == {("code_embeddings", "rows")}
    bundle = copy_with_edited_file(c2i_bundle, tmp_path / "neighbors", "neighbors", swap_neighbours)
    assert run_verify(program, bundle, *C2I_FILES)[1] == {("neighbors", "indices")}


def test_verify_fails_for_a_changed_tokenizer_file(anole_bundle: Path, tmp_path: Path, program: Any) -> None:
    bundle = copy_with_edited_file(
        anole_bundle, tmp_path / "b", "tokenizer", lambda path: path.write_text(path.read_text() + " ")
    )
    assert run_verify(program, bundle, *ANOLE_FILES)[1] == {("tokenizer", "bytes")}


def replace_class_embeddings(weights: Weights) -> None:
    rows = 13 + 1  # 13 classes, and the class of unconditional rows
    weights["cls_embedding.embedding_table.weight"] = torch.ones(rows, 64)


def remove_last_layer(weights: Weights) -> None:
    for name in [name for name in weights if name.startswith("layers.2.")]:
        del weights[name]


@pytest.mark.parametrize(
    ("edit", "fields", "words"),
    [
        (remove_last_layer, {"n_layer": 2}, "c2i_tiny.pt: target.num_layers: found 2, expected 3, as the bundle has"),
        (
            replace_class_embeddings,
            {"num_classes": 13},
            "c2i_tiny.pt: condition.classes: found 13, expected 10, as the bundle has",
        ),
        (lambda weights: None, {"block_size": 25}, "config.json: block_size: found a grid of 5, expected 4"),
    ],
)
def test_verify_rejects_a_checkpoint_of_other_sizes(
    c2i_bundle: Path, tmp_path: Path, program: Any, edit: Any, fields: Any, words: str
) -> None:
    config = copy_json(config_path(C2I), tmp_path / "config.json", **fields)
    code, _, err = program("verify", c2i_bundle, copy_weights(tmp_path, C2I, edit), VQ, config)
    assert code == 2
    assert words in err.splitlines()[-1]


def test_verify_reads_the_exported_weights_of_model_and_ema(tmp_path: Path, program: Any) -> None:
    content = torch.load(C2I, weights_only=True)
    torch.save(
        content | {"ema": {name: weight * 1.5 for name, weight in content["model"].items()}}, tmp_path / "both.pt"
    )
    files = ["--target", tmp_path / "both.pt", "--vq", VQ, "--config", config_path(C2I)]
    for i, options in enumerate((["--weights", "ema"], [])):
        code, _, err = program("export", *files, "--output", tmp_path / f"b{i}", *options)
        assert code == 0
        assert ("both.pt: has model and ema; using model" in err) == (options == [])
        assert run_verify(program, tmp_path / f"b{i}", tmp_path / "both.pt", VQ, config_path(C2I))[1] == set()
    averaged_sha256, model_sha256 = (open_bundle(tmp_path / f"b{i}").manifest.files["target"].sha256 for i in range(2))
    assert averaged_sha256 != model_sha256


def test_a_drafter_with_more_layers_is_rejected_by_file(t2i_drafter_bundle: Path, tmp_path: Path, program: Any) -> None:
    def add_second_layer(weights: Weights) -> None:
        second_layer = {name.replace("layers.0.", "layers.1."): weight.clone() for name, weight in weights.items()}
        weights |= second_layer | {"layers.1.input_layernorm.weight": torch.ones(64)}

    drafter = copy_checkpoint(DRAFTER, tmp_path / "drafter", add_second_layer, num_hidden_layers=2)
    files = [drafter if file == DRAFTER else file for file in T2I_FILES]
    code, _, err = program("verify", t2i_drafter_bundle, *files)
    assert code == 2
    line = f"{drafter}/model.safetensors: drafter.num_layers: found 2, expected 1, as the bundle has"
    assert line in err.splitlines()[-1]


def make_file_edit(change: Callable[[onnx.ModelProto], Any]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        model = onnx.load(path, load_external_data=False)
        change(model)
        path.write_bytes(model.SerializeToString())

    return edit


def find_first_matrix(model: onnx.ModelProto) -> TensorProto:
    return next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)


def move_weight_to_file(key: str, value: str) -> Callable[[Path], None]:
    """Return a function that moves a weight of a graph to another file and sets one field of the reference."""

    def edit(path: Path) -> None:
        model = onnx.load(path)
        weight = find_first_matrix(model)
        external_data_helper.set_external_data(weight, "class.data", **{"offset": 0, "length": len(weight.raw_data)})
        (path.parent / "class.data").write_bytes(weight.raw_data)
        weight.ClearField("raw_data")
        next(entry for entry in weight.external_data if entry.key == key).value = value
        path.write_bytes(model.SerializeToString())

    return edit


# By name: function that damages the graph file at a path.
DAMAGES: dict[str, Callable[[Path], None]] = {
    name: make_file_edit(change)
    for name, change in {
        "an unknown operator": lambda model: setattr(model.graph.node[0], "op_type", "Nothing"),
        "a missing input": lambda model: model.graph.node[0].input.__setitem__(0, "nowhere"),
        "no operators": lambda model: model.graph.ClearField("node"),
        "no outputs": lambda model: model.graph.ClearField("output"),
        "an operator set version that does not exist": lambda model: setattr(model.opset_import[0], "version", 4000),
        "a weight of another size": lambda model: find_first_matrix(model).dims.__setitem__(0, 7),
        "a weight of an unknown type": lambda model: setattr(find_first_matrix(model), "data_type", 99),
        "an input of strings": lambda model: setattr(
            model.graph.input[0].type.tensor_type, "elem_type", TensorProto.STRING
        ),
        "an input of 2 ** 50 rows": lambda model: setattr(
            model.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", 1 << 50
        ),
        "no inputs": lambda model: model.graph.ClearField("input"),
        "a cycle": lambda model: model.graph.node[0].input.append(model.graph.node[-1].output[0]),
    }.items()
} | {
    f"weights at {key} {value}": move_weight_to_file(key, value)
    for key, value in (("offset", "9999999999"), ("length", "-4"), ("offset", "x"), ("length", "9"))
}


@pytest.mark.parametrize("against", [[], C2I_FILES], ids=["reference", "checkpoint"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_graph_file_is_rejected_by_name(
    c2i_bundle: Path, tmp_path: Path, program: Any, damage: str, against: list[object]
) -> None:
    bundle = copy_with_edited_file(c2i_bundle, tmp_path / "b", "condition", DAMAGES[damage])
    code, _, err = program("verify", bundle, *against)
    assert code == 2
    line = err.splitlines()[-1]
    assert line.startswith(f"lantern-rt: {bundle}/condition.onnx: ")
    assert "expected a graph that runs" in line
    assert len(line) < 600
