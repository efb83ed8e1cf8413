"""Tests of image decoders in int8 and float16: the images, the sums of convolutions, and the manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from checkpoint_copies import C2I, EMU3, VQ, VQGAN, Weights, config_path, copy_weights
from family_readers import read_emu3
from goldens import compute_graph_values

from lantern_rt.bundle.manifest import Manifest
from lantern_rt.cli.main import run_program
from lantern_rt.export.compare import compare_graph_with_module
from lantern_rt.export.convolutions import measure_activation_ranges, quantize_convolutions
from lantern_rt.export.families.common import make_vq_graphs
from lantern_rt.export.graph.graphs import Graph, make_graph_file
from lantern_rt.export.measures import measure_image_difference
from lantern_rt.export.models.vq_checkpoints import read_llamagen_vq, read_vqgan


def scale_down_residuals(weights: Weights) -> None:
    """Scale the weights of residual blocks down, as in trained decoders, so that eight bits suffice."""
    for name, weight in weights.items():
        if "decoder" in name and (".conv2." in name or "proj_out" in name):
            weight.mul_(0.03)


def make_image_decoder(family: str) -> Graph:
    """Make the graph of the image decoder of a family: `llamagen`, `chameleon` or `emu3`."""
    if family == "emu3":
        graphs = read_emu3(EMU3, grid=4).graphs
    else:
        graphs = make_vq_graphs(read_llamagen_vq(VQ)[0] if family == "llamagen" else read_vqgan(VQGAN).vq, 4)
    return next(graph for graph in graphs if graph.role == "vq_decoder")


@pytest.mark.parametrize("family", ["llamagen", "chameleon", "emu3"])
def test_images_of_an_int8_decoder_are_near_float32_images(tmp_path: Path, family: str) -> None:
    graph = make_image_decoder(family)
    path = tmp_path / "vq_decoder.onnx"
    scale_down_residuals(graph.module.state_dict())
    plan = make_graph_file(graph)
    quantize_convolutions(plan, measure_activation_ranges(graph, 96))
    plan.write(path)
    mean_levels, psnr = measure_image_difference(compare_graph_with_module(graph, path, [*graph.test_cases]))
    assert mean_levels < 2  # 255 levels from black to white
    assert psnr > 40  # dB
    model = onnx.load(path)
    onnx.checker.check_model(model)
    kernels = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    convolutions = [node for node in model.graph.node if node.op_type == "Conv" and node.input[1] in kernels][:-1]
    assert max(np.abs(kernel).max() for name, kernel in kernels.items() if name.endswith(".int8")) == 64
    feeds = dict(next(iter(graph.test_cases.values())))
    values = compute_graph_values(
        path, [name for node in convolutions for name in (node.input[0], node.output[0])], feeds
    )
    for node, node_input, node_output in zip(convolutions, values[::2], values[1::2], strict=True):
        kernel, bias = (torch.from_numpy(kernels[name].astype(np.float64)) for name in node.input[1:])
        pads = next(attribute.ints for attribute in node.attribute if attribute.name == "pads")
        exact_sums = F.conv2d(torch.from_numpy(node_input.astype(np.float64)), kernel, bias, padding=pads[0])
        # The sums of integers are so small that float32 never rounds, so the order of addition has no effect.
        np.testing.assert_array_equal(node_output, exact_sums.numpy())


def test_onnx_runtime_fuses_every_int8_convolution(tmp_path: Path) -> None:
    graph = make_image_decoder("llamagen")
    plan = make_graph_file(graph)
    quantize_convolutions(plan, measure_activation_ranges(graph, 96))
    options: Any = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    onnxruntime.InferenceSession(plan.write(tmp_path / "vq_decoder.onnx")[0], options)
    ops = [node.op_type for node in onnx.load(tmp_path / "fused.onnx").graph.node]
    assert ops.count("QLinearConv") == sum(name.endswith(".int8") for name in plan.weights) > 20


@pytest.mark.parametrize(("precision", "calibration"), [("int8", "8 pictures of random codes"), ("fp16", None)])
def test_verify_compares_images_of_an_int8_decoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str, calibration: str | None
) -> None:
    scaled_vq = copy_weights(tmp_path, VQ, scale_down_residuals)
    config = config_path(C2I)
    export = ["export", "--target", C2I, "--config", config, "--vq-precision", precision, "--vq"]
    if calibration:
        assert run_program([str(word) for word in (*export, VQ, "--output", tmp_path / "bundle")]) == 2
        # The random weights of `VQ` need more than eight bits.
        assert "vq_decoder.onnx in int8: found images" in capsys.readouterr().err
    assert run_program([str(word) for word in (*export, scaled_vq, "--output", tmp_path / "bundle")]) == 0
    manifest = Manifest.model_validate_json((tmp_path / "bundle/bundle.json").read_text())
    assert (manifest.vq_precision, manifest.provenance.calibration) == (precision, calibration)
    weights = onnx.load(tmp_path / "bundle/vq_decoder.onnx").graph.initializer
    assert any(tensor.data_type == onnx.TensorProto.FLOAT for tensor in weights) == (precision == "int8")
    capsys.readouterr()
    for checkpoints, exit_code in (([], 0), ([C2I, scaled_vq, config], 0), ([C2I, VQ, config], 2)):
        assert run_program([str(word) for word in ("verify", tmp_path / "bundle", *checkpoints, "--json")]) == exit_code
        (row,) = json.loads(capsys.readouterr().out)["pictures"]
        assert row["passed"] == (exit_code == 0) == (row["levels"] <= 1 and row["psnr"] >= 40)
