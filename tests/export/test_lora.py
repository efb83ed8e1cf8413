"""LoRA adapters: merged at export as PEFT merges them, recorded and verified; what does not fit is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_copies import C2I, EMU3, VQ, Weights, config_of, copied, edited
from safetensors.torch import save_file

from lantern_rt.bundle.files import open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.errors import CheckpointError
from lantern_rt.export.checkpoints.deferred import computed
from lantern_rt.export.checkpoints.lora import read_adapter, split_scale
from lantern_rt.export.families.emu3 import read_emu3

FUSED, OUT = "layers.0.attention.wqkv", "layers.1.attention.wo"


def adapter(
    folder: Path, shapes: dict[str, tuple[int, int]], weights: Weights | None = None, **config: Any
) -> tuple[Path, Weights]:
    """A folder as PEFT saves it, of rank 2 and alpha 6, and its products; shapes are outputs and inputs of layers."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(len(folder.name))
    tensors, products = dict(weights or {}), {}
    for name, (outputs, inputs) in shapes.items():
        first, second = (0.1 * torch.randn(shape, generator=generator) for shape in ((2, inputs), (outputs, 2)))
        tensors |= {
            f"base_model.model.{name}.lora_{part}.weight": one for part, one in {"A": first, "B": second}.items()
        }
        products[f"{name}.weight"] = second @ first
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", "alpha_pattern": {}} | config
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder, products


def test_adapters_are_merged_in_order_recorded_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, first = adapter(tmp_path / "one", {FUSED: (192, 64), OUT: (64, 64)})
    two, second = adapter(tmp_path / "second", {OUT: (64, 64)})

    def merge(weights: Weights) -> None:
        for products, factor in ((first, 3.0), (second, 1.5)):
            for name, product in products.items():
                weights[name] = weights[name] + factor * product

    targets = {"lora": [C2I, "--lora", one, "--lora", f"{two}:0.5"], "merged": [edited(tmp_path, C2I, merge)]}
    for name, files in targets.items():
        files += ["--vq", VQ, "--config", config_of(C2I), "--output", tmp_path / name]
        assert run_program(["export", "--target", *map(str, files)]) == 0
    manifest = open_bundle(tmp_path / "lora").manifest
    assert manifest.files == open_bundle(tmp_path / "merged").manifest.files
    sources = [(own.role, own.name) for own in manifest.provenance.sources if own.role.startswith("lora:")]
    assert sources == [("lora:1.0", "adapter_model.safetensors"), ("lora:0.5", "adapter_model.safetensors")]
    places = [str(place) for place in (tmp_path / "lora", C2I, VQ, config_of(C2I), one, two)]
    assert run_program(["verify", *places]) == 0
    assert run_program(["verify", *places[:-1]]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("config (config.json), LoRA adapter, LoRA adapter")


def test_names_of_a_library_that_nests_the_decoder_otherwise_are_found(tmp_path: Path) -> None:
    layer = "layers.1.self_attn.q_proj"
    lora, products = adapter(tmp_path / "lora", {f"model.text_model.{layer}": (48, 48)}, use_rslora=True)
    (product,) = products.values()

    def merge(weights: Weights) -> None:
        weights[f"text_model.model.{layer}.weight"] += 0.7 * 6 / 2**0.5 * product

    models = (
        read_emu3(EMU3, grid=6, lora=[read_adapter(lora, 0.7)]),
        read_emu3(copied(EMU3, tmp_path / "merged", merge), grid=6),
    )
    found, expected = ({k: computed(v) for k, v in m.graphs[0].module.state_dict().items()} for m in models)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("shapes", "weights", "config", "said"),
    [
        ({"layers.0.attention.wq": (64, 64)}, {}, {}, "layers.0.attention.wq.weight: the target has no such weight"),
        ({"layers.0.attention.wq": (64, 64)}, {}, {}, "layers.0.attention.wqkv.weight"),  # what there is
        ({FUSED: (64, 64)}, {}, {}, "found shape [64, 64], expected [192, 64], the target's"),
        ({OUT: (64, 64)}, {f"base_model.model.{OUT}.lora_magnitude_vector": torch.ones(64)}, {}, "magnitude_vector"),
        ({}, {f"base_model.model.{OUT}.lora_A.weight": torch.ones(2, 64)}, {}, "wo.weight: found lora_A [2, 64]"),
        ({OUT: (64, 64)}, {}, {"use_dora": True}, "adapter_config.json: use_dora: found True"),
        ({OUT: (64, 64)}, {}, {"peft_type": "IA3"}, "peft_type: found 'IA3', expected 'LORA'"),
        ({OUT: (64, 64)}, {}, {"init_lora_weights": "pissa"}, "merge it with PEFT, and export the result"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    shapes: dict[str, tuple[int, int]],
    weights: Weights,
    config: dict[str, Any],
    said: str,
) -> None:
    lora, _ = adapter(tmp_path / "lora", shapes, weights, **config)
    files = ["--target", C2I, "--vq", VQ, "--config", config_of(C2I), "--lora", lora, "--output", tmp_path / "b"]
    assert run_program(["export", *map(str, files)]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_scale_stands_behind_the_folder() -> None:
    assert split_scale("style/") == ("style/", 1.0)
    assert split_scale("hf:owner/style@v1:-0.5") == ("hf:owner/style@v1", -0.5)
    assert split_scale("hf:owner/style") == ("hf:owner/style", 1.0)
    for text in (":1", "style:nan"):
        with pytest.raises(CheckpointError, match="expected FOLDER or FOLDER:scale"):
            split_scale(text)
