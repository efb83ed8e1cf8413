"""What tests of the TensorRT backends ask them to build."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from lantern_rt.engines.profiles import BuildOptions, Profile

RTX = BuildOptions("tensorrt-rtx", max_rows=2, max_nodes=8, compute_capabilities=("SM89", "SM120"))
ONE_ROW = Profile(name="rows", rows=(1, 1, 1), nodes=(0, 0, 0), columns=(0, 0, 0))


def silent(what: str, done: int, total: int) -> None:
    pass


def bad_graph(path: Path, op: str) -> Any:
    """A bundle whose graph has an op that TensorRT lacks, behind a product with a named weight."""
    nodes = [
        helper.make_node("MatMul", ["codes", "layers.3.ffn.up.weight"], ["up"], name="matmul_1"),
        helper.make_node(op, ["up"], ["images"], name="strange_2", domain="" if op == "Det" else "elsewhere"),
    ]
    inputs = [helper.make_tensor_value_info("codes", TensorProto.FLOAT, ["rows", 4])]
    outputs = [helper.make_tensor_value_info("images", TensorProto.FLOAT, None)]
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "layers.3.ffn.up.weight")
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("elsewhere", 1)]
    graph = helper.make_graph(nodes, "bad", inputs, outputs, [weight])
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return SimpleNamespace(path=lambda _: path, manifest=SimpleNamespace(target=None, drafter=None, sizes=()))
