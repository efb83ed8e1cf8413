"""TensorRT-RTX engines for two GPUs, built without a GPU: a model with the sizes of LlamaGen-XL, and `scenes`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lantern_rt.bundle.files import open_bundle
from lantern_rt.bundle.weights import StoredWeights
from lantern_rt.engines.build import build_engines
from lantern_rt.engines.engine_folder import EngineManifest, open_engine_folder
from lantern_rt.engines.profiles import BuildOptions

for module in ("torch", "tensorrt_rtx"):
    pytest.importorskip(module, reason="needs lantern-rt[export,tensorrt-rtx]")
pytestmark = pytest.mark.slow
GPUS = ("SM89", "SM120")


def ignore_progress(*_: object) -> None:
    pass


def build_and_check_engines(bundle: Path) -> EngineManifest:
    loaded_bundle = open_bundle(bundle)
    folder = bundle.with_name("engines")
    options = BuildOptions("tensorrt-rtx", max_rows=2, max_nodes=64, compute_capabilities=GPUS)
    build_engines(loaded_bundle, str(bundle), options, folder, False, ignore_progress)
    manifest = open_engine_folder(folder).manifest
    assert manifest.compute_capabilities == GPUS
    assert manifest.bundle_sha256 == loaded_bundle.digest
    for role, graph in manifest.graphs.items():
        assert graph.bytes == (folder / f"{role}.plan").stat().st_size
    return manifest


@pytest.mark.parametrize("compute", ["float16", "float32"])
def test_engines_of_llamagen_xls_sizes_are_built_for_two_gpus(compute: str, tmp_path: Path) -> None:
    import torch
    from random_bundle import SHAPES, export_checkpoints, write_checkpoints

    # A bfloat16 checkpoint and a narrow image decoder make the files smaller.
    shape = replace(SHAPES["GPT-XL"], dtype=torch.bfloat16, vq_width=32)
    write_checkpoints(shape, tmp_path / "checkpoints", drafter=False)
    export_checkpoints(shape, tmp_path / "checkpoints", tmp_path / "bundle", compute=compute)
    manifest = build_and_check_engines(tmp_path / "bundle")
    assert manifest.precision == compute
    assert manifest.graphs.keys() == {"target", "vq_decoder"}
    num_weights = StoredWeights(tmp_path / "bundle/target.onnx").count_float_elements()
    weight_bytes = (2 if compute == "float16" else 4) * num_weights
    # The engine stores the weights once for both GPUs, and kernels.
    assert weight_bytes < manifest.graphs["target"].bytes < 1.2 * weight_bytes
    profile_sizes = [(p.name, p.nodes[2], p.columns[2]) for p in manifest.graphs["target"].profiles]
    assert profile_sizes == [("ar", 2, 384), ("tree", 64, 384)]


def test_engines_of_the_scenes_model_are_built_in_float16(tmp_path: Path) -> None:
    from recipes.scenes.bundle import write_scenes_bundle
    from recipes.scenes.restore import restore_work_folder

    restore_work_folder("scenes", tmp_path / "work")
    write_scenes_bundle(tmp_path / "work", tmp_path / "bundle", False, ignore_progress, "float16")
    manifest = build_and_check_engines(tmp_path / "bundle")
    assert manifest.precision == "float16"
    assert manifest.graphs.keys() == {"target", "drafter", "vq_decoder"}
