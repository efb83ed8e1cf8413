"""Loading the graphs of a bundle, and bundles with wrong graphs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from bundle_folder import write_bundle_manifest
from refusals import catch_error, expect_error

from lantern_rt import Pipeline
from lantern_rt.bundle.files import open_bundle
from lantern_rt.engines.contracts import TensorSpec
from lantern_rt.engines.graph_writer import GraphWriter
from lantern_rt.engines.loader import BundleEngines
from lantern_rt.errors import BundleError, EngineError

SINGLE_THREAD = 1


@pytest.fixture
def bundle_copy(c2i_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(c2i_bundle, tmp_path / "bundle"))


def test_the_prefix_of_a_class_does_not_depend_on_the_batch(c2i_bundle: Path) -> None:
    engines = BundleEngines(open_bundle(c2i_bundle), SINGLE_THREAD)
    prefix, uncond_prefix = engines.compute_condition({"class_ids": np.array([3, 4, 3])})
    assert prefix.shape == uncond_prefix.shape == (3, 1, 64)
    assert np.array_equal(prefix[0], prefix[2])
    assert np.array_equal(uncond_prefix[0], uncond_prefix[1])


def test_the_drafter_of_a_bundle_is_loaded_at_the_first_use(t2i_drafter_bundle: Path, tmp_path: Path) -> None:
    bundle_copy = Path(shutil.copytree(t2i_drafter_bundle, tmp_path / "bundle"))
    bundle = open_bundle(bundle_copy)
    (bundle_copy / "drafter.onnx").unlink()
    engines = BundleEngines(bundle, SINGLE_THREAD)
    with expect_error(BundleError, "drafter.onnx"):
        engines.load_all()


@pytest.mark.parametrize(("role", "tensor"), [("vq_decoder", "codes"), ("condition", "class_ids")])
def test_a_wrong_graph_is_detected_on_loading(bundle_copy: Path, role: str, tensor: str) -> None:
    shutil.copy(bundle_copy / "target.onnx", bundle_copy / f"{role}.onnx")
    write_bundle_manifest(bundle_copy, json.loads((bundle_copy / "bundle.json").read_text()))
    error = catch_error(BundleError, Pipeline.from_bundle, bundle_copy, threads=SINGLE_THREAD)
    assert error.field == f"{bundle_copy / role}.onnx: input `{tensor}`"


def test_an_image_encoder_must_accept_images_of_three_channels(bundle_copy: Path) -> None:
    graph = GraphWriter()
    bounds = (graph.int_vector(0), graph.int_vector(16), graph.int_vector(1))
    codes = graph.op("Slice", graph.reshape("images", 0, -1), *bounds)
    graph.op("Cast", codes, name="codes", to=7)
    images = TensorSpec("images", ("float32",), ("rows", 4, 64, 64))
    data = graph.to_bytes([images], [TensorSpec("codes", ("int64",), ("rows", 16))])
    (bundle_copy / "vq_encoder.onnx").write_bytes(data)
    write_bundle_manifest(bundle_copy, json.loads((bundle_copy / "bundle.json").read_text()))
    engines = BundleEngines(open_bundle(bundle_copy), SINGLE_THREAD)
    with expect_error(BundleError, "input `images`"):
        engines.encode_images(np.zeros((1, 3, 64, 64), np.float32))


def test_codes_outside_the_codebook_are_an_error(c2i_bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with expect_error(EngineError, "failed to run the graph"):
        BundleEngines(open_bundle(c2i_bundle), SINGLE_THREAD).decode_images(np.full((1, 16), 999))
    assert capfd.readouterr() == ("", "")
