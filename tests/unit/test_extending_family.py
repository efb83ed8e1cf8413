"""Model families need only a module and a name in the registry: export of a toy family."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops
from refusals import catch_error

from lantern_rt.errors import CheckpointError
from lantern_rt.export import families, registry

DATA = Path(__file__).parents[1] / "data"
VQ = DATA / "llamagen-vq/vq_tiny.pt"
# A family like LlamaGen, except for the name of one matrix and the guidance scale.
TOY_MODULE = """
from pathlib import Path

from lantern_rt.export.checkpoints.folders import Checkpoint
from lantern_rt.export.family import ModelFamily
from lantern_rt.export.families.common_llamagen import (
    LlamaGenVariant,
    build_llamagen_model,
    read_llamagen_transformer,
)
from lantern_rt.export.model import BundleContents
from lantern_rt.methods import Sampling


def read_toy(target: Checkpoint, vq: Path, *, grid: int | None = None) -> BundleContents:
    variant = LlamaGenVariant(weight_names={"head.weight": "toy_head"})
    transformer = read_llamagen_transformer(target, grid=grid, variant=variant)
    return build_llamagen_model(transformer, vq, weights=None, sampling=Sampling(cfg_scale=2.0))


FAMILY = ModelFamily(read_toy, model_types=("toy",))
"""


@pytest.fixture
def toy_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Add the toy family to the registry, and return an empty folder for a checkpoint."""
    for library in ("torch", "onnx", "onnxruntime", "safetensors"):
        pytest.importorskip(library)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/toy.py").write_text(TOY_MODULE)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path / "modules")])
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, "toy"))
    return tmp_path


def test_a_toy_family_generates_the_images_of_llamagen(program: Any, toy_folder: Path, c2i_bundle: Path) -> None:
    torch = pytest.importorskip("torch")
    weights = torch.load(DATA / "llamagen-c2i/c2i_tiny.pt", weights_only=True)
    weights["model"]["toy_head"] = weights["model"].pop("output.weight")
    torch.save(weights, target := toy_folder / "toy.pt")
    shutil.copy(DATA / "llamagen-c2i/config.json", toy_folder)
    assert program("export", "--family", "toy", "--target", target, "--vq", VQ, "--output", "toy")[0] == 0
    assert program("verify", "toy", target, VQ)[0] == 0
    assert program("run", "toy", "--class-id", 3, "--seed", 0, "--output", "toy.png")[0] == 0
    options = ("--class-id", 3, "--seed", 0, "--cfg-scale", 2)
    assert program("run", c2i_bundle, *options, "--output", "llamagen.png")[0] == 0
    with Image.open("toy.png") as image, Image.open("llamagen.png") as expected:
        assert ImageChops.difference(image, expected).getbbox() is None


@pytest.mark.parametrize(
    ("family", "options", "field", "reason"),
    [
        ("toy", {"vq": VQ, "drafter": "d"}, "drafter", "family toy does not take it"),
        ("toy", {}, "vq", "a checkpoint, which family toy needs"),
        ("llamagen", {"vq": VQ}, "model_type", "give `--family toy`, or another target"),
        ("tay", {"vq": VQ}, "family", "simplear or prologue or toy"),
    ],
)
def test_invalid_options_for_a_toy_family_are_rejected(
    toy_folder: Path, family: str, options: dict[str, Any], field: str, reason: str
) -> None:
    (toy_folder / "config.json").write_text('{"model_type": "toy"}')
    error = catch_error(CheckpointError, registry.read_family_checkpoints, family, {"target": toy_folder, **options})
    assert error.field.endswith(field)
    assert reason in f"{error.problem} {error.expected} {error.remedy}"
