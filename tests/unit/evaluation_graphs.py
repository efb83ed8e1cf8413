"""Small ONNX graphs for evaluation: image features, agreement of images with prompts, and a VQ encoder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from bundle_folder import write_bundle_manifest
from onnx import TensorProto, helper, numpy_helper
from tiny_bundle import CELL

IMAGE_SIDE = 6 * CELL  # pixels


def ignore_progress(stage: str, done: int = 0, total: int = 0) -> None:
    pass


def make_feature_graph(path: Path, pooled: bool = True, size: int | str = "side") -> Path:
    """Write an ONNX graph of features: all pixels of an image, or if `pooled` the mean colour, `[n, 3]`."""
    shape = ("n", 3, size, size)
    nodes = [helper.make_node("Identity", ["pixels"], ["features"])]
    constants = []
    if pooled:
        nodes = [helper.make_node("ReduceMean", ["pixels", "axes"], ["features"], keepdims=0)]
        constants = [numpy_helper.from_array(np.array([2, 3]), "axes")]
    axes = ("n", 3) if pooled else shape
    graph = helper.make_graph(
        nodes,
        "features",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, axes)],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    return path


def make_agreement_graph(
    path: Path, length: int | str = "length", mask: bool = False, every_pair: bool = False
) -> Path:
    """Write an ONNX graph of prompt agreement: the mean value of the image plus ten times the sum of the token ids."""
    nodes = [
        helper.make_node("ReduceMean", ["pixels", "places"], ["brightness"], keepdims=int(every_pair)),
        helper.make_node("Cast", ["mask" if mask else "one"], ["shown"], to=TensorProto.BOOL),
        helper.make_node("Where", ["shown", "ids", "none"], ["seen"]),
        helper.make_node("ReduceSum", ["seen", "last"], ["sum"], keepdims=0),
        helper.make_node("Cast", ["sum"], ["words"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["words", "ten"], ["tens"]),
        helper.make_node("Add", ["brightness", "tens"], ["agreement"]),
    ]
    if every_pair:  # brightness [n, 1]
        nodes[0].output[0] = "mean"
        nodes.insert(1, helper.make_node("Reshape", ["mean", "column"], ["brightness"]))
    text = ("n", length)
    inputs = [helper.make_tensor_value_info("mask", TensorProto.INT64, text)] if mask else []
    inputs += [
        helper.make_tensor_value_info("ids", TensorProto.INT64, text),
        helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ("n", 3, "h", "w")),
    ]
    constants = {"places": np.array([1, 2, 3]), "last": np.array([1]), "ten": np.array([10], np.float32)}
    constants |= {"column": np.array([-1, 1]), "one": np.array([1]), "none": np.array([0])}
    shape = ("n", "n") if every_pair else ("n",)
    graph = helper.make_graph(
        nodes,
        "agreement",
        inputs,
        [helper.make_tensor_value_info("agreement", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    return path


def add_vq_encoder(folder: Path) -> Path:
    """Add an image encoder that returns the mean colour of each cell, `[n, 3, 6, 6]`; return the bundle's folder."""
    grid = IMAGE_SIDE // CELL
    graph = helper.make_graph(
        [helper.make_node("AveragePool", ["images"], ["pre_quant"], kernel_shape=[CELL, CELL], strides=[CELL, CELL])],
        "vq_encoder",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ("n", 3, IMAGE_SIDE, IMAGE_SIDE))],
        [helper.make_tensor_value_info("pre_quant", TensorProto.FLOAT, ("n", 3, grid, grid))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    (folder / "vq_encoder.onnx").write_bytes(model.SerializeToString())
    manifest = json.loads((folder / "bundle.json").read_text())
    manifest["files"]["vq_encoder"] = {"path": "vq_encoder.onnx", "sha256": "0" * 64, "bytes": 0}
    write_bundle_manifest(folder, manifest)
    return folder
