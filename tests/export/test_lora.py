"""LoRA adapters are merged at export as PEFT merges them; adapters that do not fit the target are rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_copies import C2I, COSMOS, EMU3, SIMPLEAR, VQ, Weights, config_path, copy_checkpoint, copy_weights
from family_readers import read_emu3, read_llamagen_transformer, read_simplear
from refusals import catch_error
from safetensors.torch import load_file, save_file
from torch import Tensor

from lantern_rt.bundle.files import open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.errors import CheckpointError
from lantern_rt.export.checkpoints.deferred import compute_deferred_tensor
from lantern_rt.export.checkpoints.lora import read_adapter, split_folder_and_scale
from lantern_rt.export.model import BundleContents

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
QKV_LAYER = "layers.0.attention.wqkv"
OUTPUT_LAYER = "layers.1.attention.wo"


def save_adapter(
    folder: Path, shapes: dict[str, tuple[int, int]], weights: Weights | None = None, **config: Any
) -> tuple[Path, Weights]:
    """Save a random adapter of rank 2 and alpha 6 in PEFT's format; return its folder, and `B @ A` by weight."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(len(folder.name))
    tensors = dict(weights or {})
    products = {}
    for name, (outputs, inputs) in shapes.items():
        down, up = (0.1 * torch.randn(shape, generator=generator) for shape in ((2, inputs), (outputs, 2)))
        tensors |= {
            f"base_model.model.{name}.lora_{part}.weight": matrix for part, matrix in {"A": down, "B": up}.items()
        }
        products[f"{name}.weight"] = up @ down
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", "alpha_pattern": {}} | config
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder, products


def list_target_weights(model: BundleContents) -> dict[str, Tensor]:
    return {name: compute_deferred_tensor(weight) for name, weight in model.graphs[0].module.state_dict().items()}


def test_a_bundle_has_the_merged_weights_and_verify_checks_scales(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first_folder, first_products = save_adapter(tmp_path / "first", {QKV_LAYER: (192, 64), OUTPUT_LAYER: (64, 64)})
    second_folder, second_products = save_adapter(tmp_path / "second", {OUTPUT_LAYER: (64, 64)})

    def add_products(weights: Weights) -> None:
        for products, factor in ((first_products, 3.0), (second_products, 1.5)):  # scale * alpha / rank
            for name, product in products.items():
                weights[name] = weights[name] + factor * product

    targets = {
        "lora": [C2I, "--lora", first_folder, "--lora", f"{second_folder}:0.5"],
        "merged": [copy_weights(tmp_path, C2I, add_products)],
    }
    for name, files in targets.items():
        files += ["--vq", VQ, "--config", config_path(C2I), "--output", tmp_path / name]
        assert run_program(["export", "--target", *map(str, files)]) == 0
    manifest = open_bundle(tmp_path / "lora").manifest
    assert manifest.files == open_bundle(tmp_path / "merged").manifest.files
    sources = [(source.role, source.name) for source in manifest.provenance.sources if source.role.startswith("lora:")]
    assert sources == [("lora:1.0", "adapter_model.safetensors"), ("lora:0.5", "adapter_model.safetensors")]
    paths = [str(path) for path in (tmp_path / "lora", C2I, VQ, config_path(C2I), first_folder, second_folder)]
    assert run_program(["verify", *paths]) == 0
    assert run_program(["verify", *paths[:-1], f"{second_folder}:0.50"]) == 0  # the scale at export
    assert run_program(["verify", *paths[:-1], f"{second_folder}:0.7"]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith(f"lantern-rt: {second_folder}:0.7: found scale 0.7, expected 0.5;")
    )
    assert run_program(["inspect", paths[0]]) == 0
    assert "\n  lora:0.5     adapter_model.safetensors\n" in capsys.readouterr().out
    assert run_program(["verify", *paths[:-1]]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("config (config.json), LoRA adapter, LoRA adapter")


def test_an_adapter_may_have_another_module_prefix(tmp_path: Path) -> None:
    layer = "layers.1.self_attn.q_proj"
    lora, products = save_adapter(tmp_path / "lora", {f"model.text_model.{layer}": (48, 48)}, use_rslora=True)
    (product,) = products.values()

    def add_product(weights: Weights) -> None:
        # The scale of rank-stabilized LoRA is alpha / sqrt(rank).
        weights[f"text_model.model.{layer}.weight"] += 0.7 * 6 / 2**0.5 * product

    models = (
        read_emu3(EMU3, grid=6, lora=[f"{lora}:0.7"]),
        read_emu3(copy_checkpoint(EMU3, tmp_path / "merged", add_product), grid=6),
    )
    torch.testing.assert_close(*map(list_target_weights, models), rtol=0, atol=1e-6)


@pytest.mark.parametrize("stores_head", [False, True])
def test_an_adapter_of_a_tied_head_leaves_the_embeddings(tmp_path: Path, stores_head: bool) -> None:
    rows, width = load_file(SIMPLEAR / "model.safetensors")[EMBED].shape
    lora, products = save_adapter(tmp_path / "lora", {"lm_head": (rows, width)})

    def add_merged_head(weights: Weights) -> None:
        weights[HEAD] = (weights[EMBED].float() + 3 * products[HEAD]).to(weights[EMBED].dtype)

    tied = SIMPLEAR
    if stores_head:  # Files that are not safetensors store a tied head.
        tied = copy_checkpoint(
            SIMPLEAR, tmp_path / "tied", lambda weights: weights.update({HEAD: weights[EMBED].clone()})
        )
    adapted = read_simplear(tied, COSMOS, grid=4, lora=[str(lora)])
    expected = read_simplear(
        copy_checkpoint(SIMPLEAR, tmp_path / "untied", add_merged_head, tie_word_embeddings=False), COSMOS, grid=4
    )
    torch.testing.assert_close(list_target_weights(adapted), list_target_weights(expected), rtol=0, atol=1e-5)
    assert torch.equal(adapted.code_embeddings, expected.code_embeddings)


@pytest.mark.parametrize("scale", [1e39, 1e308, -1e300])
def test_a_scale_that_makes_weights_infinite_is_rejected(tmp_path: Path, scale: float) -> None:
    lora, _ = save_adapter(tmp_path / "lora", {OUTPUT_LAYER: (64, 64)})
    error = catch_error(
        CheckpointError, read_llamagen_transformer, C2I, config=config_path(C2I), lora=[read_adapter(lora, scale)]
    )
    assert error.field == f"{lora / 'adapter_model.safetensors'}: {OUTPUT_LAYER}.weight"
    assert "infinite weights" in error.problem
    assert error.remedy == "give a smaller scale, or correct lora_alpha"


def test_merged_weights_beyond_float16_are_rejected_for_float16(tmp_path: Path) -> None:
    lora, _ = save_adapter(tmp_path / "lora", {OUTPUT_LAYER: (64, 64)}, lora_alpha=1e7)
    weights = {f"{OUTPUT_LAYER}.weight": torch.ones(64, 64)}
    read_adapter(lora, 1.0).merge(weights, lambda name: True)
    with pytest.raises(CheckpointError):
        read_adapter(lora, 1.0).merge({f"{OUTPUT_LAYER}.weight": torch.ones(64, 64).half()}, lambda name: True)


def test_an_adapter_of_other_layers_is_rejected(tmp_path: Path) -> None:
    lora, _ = save_adapter(tmp_path / "lora", {"lm_head": (64, 64)})
    error = catch_error(
        CheckpointError,
        read_adapter(lora, 1.0).merge,
        {f"{OUTPUT_LAYER}.weight": torch.ones(64, 64)},
        lambda name: not name.startswith("lm_head"),
    )
    assert error.problem == "adapts no layer that generates images"


def test_an_adapter_without_safetensors_is_to_be_saved_again(tmp_path: Path) -> None:
    lora, _ = save_adapter(tmp_path / "lora", {OUTPUT_LAYER: (64, 64)})
    torch.save(load_file(lora / "adapter_model.safetensors"), lora / "adapter_model.bin")
    (lora / "adapter_model.safetensors").unlink()
    error = catch_error(CheckpointError, read_adapter, lora, 1.0)
    assert error.remedy == "load the adapter with PEFT and save it again"


OUTPUT = {OUTPUT_LAYER: (64, 64)}
QUERIES = {"layers.0.attention.wq": (64, 64)}
LORA = f"base_model.model.{OUTPUT_LAYER}"
# Shapes of layers, other weights of the adapter, other fields of its configuration, and words of the error message.
INVALID_ADAPTERS: list[tuple[dict[str, tuple[int, int]], Weights, dict[str, Any], str]] = [
    (QUERIES, {}, {}, "layers.0.attention.wq.weight: the target has no such weight"),
    (QUERIES, {}, {}, "layers.0.attention.wqkv.weight"),  # the error lists weights of the target
    ({QKV_LAYER: (64, 64)}, {}, {}, "found shape [64, 64], expected [192, 64], the target's"),
    (OUTPUT, {f"{LORA}.lora_magnitude_vector": torch.ones(64)}, {}, "magnitude_vector"),
    ({}, {f"{LORA}.lora_A.weight": torch.ones(2, 64)}, {}, "wo.weight: found lora_A [2, 64]"),
    (OUTPUT | {f"model.{OUTPUT_LAYER}": (64, 64)}, {}, {}, f"model.{OUTPUT_LAYER}.weight: is in the file twice, under"),
    ({"tok_embeddings": (64, 64)}, {}, {}, "tok_embeddings.lora_A.weight: expected lora_A and lora_B of linear layers"),
    (OUTPUT, {}, {"a_field_to_come": "x"}, "adapter_config.json: a_field_to_come: found 'x', expected PEFT's"),
    (OUTPUT, {}, {"rank_pattern": ["wo"]}, "adapter_config.json: rank_pattern: found nothing"),
    (OUTPUT, {}, {"use_dora": True}, "adapter_config.json: use_dora: found True"),
    (OUTPUT, {}, {"peft_type": "IA3"}, "peft_type: found 'IA3', expected 'LORA'"),
    (OUTPUT, {}, {"init_lora_weights": "pissa"}, "merge it with PEFT, and export the result"),
]


@pytest.mark.parametrize(("shapes", "weights", "config", "message"), INVALID_ADAPTERS)
def test_invalid_adapters_are_rejected_by_weight_or_field(
    tmp_path: Path, program: Any, shapes: Any, weights: Weights, config: dict[str, Any], message: str
) -> None:
    lora, _ = save_adapter(tmp_path / "lora", shapes, weights, **config)
    files = ["--target", C2I, "--vq", VQ, "--config", config_path(C2I), "--lora", lora, "--output", tmp_path / "b"]
    code, _, err = program("export", *files)
    assert (code, message in err.splitlines()[-1]) == (2, True), err


def test_an_adapter_option_holds_a_folder_and_an_optional_scale() -> None:
    assert split_folder_and_scale("style/") == ("style/", 1.0)
    assert split_folder_and_scale("hf:owner/style@v1:-0.5") == ("hf:owner/style@v1", -0.5)
    assert split_folder_and_scale("hf:owner/style") == ("hf:owner/style", 1.0)
    for text in (":1", "style:nan"):
        with pytest.raises(CheckpointError, match="expected FOLDER or FOLDER:scale"):
            split_folder_and_scale(text)
