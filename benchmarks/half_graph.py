"""A float32 graph as the same graph in float16: inputs, weights and results, but for the logits."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from lantern_rt import open_bundle
from lantern_rt.manifest import FileEntry


def halve_graph(source: Path, goal: Path) -> None:
    """Write `goal` and its external data; strongly typed builders take the types from here."""
    model = onnx.load(source)
    graph = model.graph
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
        node.output[:] = ["half_logits" if name == "logits" else name for name in node.output]
    for value in [*graph.input, *(value for value in graph.output if value.name != "logits")]:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    graph.node.append(helper.make_node("Cast", ["half_logits"], ["logits"], name="logits.cast", to=TensorProto.FLOAT))
    onnx.save(model, goal, save_as_external_data=True, location=f"{goal.name}.data", size_threshold=1024)


def halve_bundle(source: Path, goal: Path) -> None:
    """Write a bundle whose target and drafter compute in float16, all else as in `source`."""
    bundle = open_bundle(source)
    shutil.copytree(source, goal)
    files = dict(bundle.manifest.files)
    for role in ("target", "drafter"):
        graph, data = (goal / name for name in (files[role].path, f"{files[role].path}.data"))
        data.unlink(missing_ok=True)
        halve_graph(bundle.path(role), graph)
        files[role], files[f"{role}.data"] = FileEntry.of(graph), FileEntry.of(data)
    target = bundle.manifest.target.model_copy(update={"dtype": "float16"})
    manifest = bundle.manifest.model_copy(update={"target": target, "files": files})
    (goal / "bundle.json").write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
