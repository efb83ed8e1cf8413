"""Writing an ONNX graph op by op: values are names, weights are kept as tensors until the file is written.

Large weights go to one file beside the graph (`<role>.onnx.data`), written straight from the tensors, so a
checkpoint is never held twice. Does not know models: what the ops mean is the caller's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

OPSET, IR_VERSION = 20, 10
EXTERNAL_ABOVE = 1024  # bytes: smaller weights stay in the graph, where shape inference can read them
_ALIGNMENT = 4096  # of each weight in the data file, so that it can be mapped
_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.int64: TensorProto.INT64,
    "float32": TensorProto.FLOAT,
    "int64": TensorProto.INT64,
}


@dataclass(frozen=True)
class Value:
    """A graph input or output: `axes` are sizes, or names of sizes that vary from call to call."""

    name: str
    axes: tuple[int | str, ...]
    dtype: str = "float32"

    def proto(self) -> onnx.ValueInfoProto:
        """The same in ONNX."""
        return helper.make_tensor_value_info(self.name, _TYPES[self.dtype], list(self.axes))


@dataclass
class Ops:
    """A graph being written. Every method returns names of values."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def weight(self, name: str, tensor: Tensor) -> str:
        """A constant of the graph; the same name may be given twice."""
        self.weights.setdefault(name, tensor.detach())
        return name

    def ints(self, *values: int) -> str:
        """A constant int64 vector, for axes and shapes."""
        return self.weight("ints_" + "_".join(map(str, values)).replace("-", "m"), torch.tensor(values))

    def many(self, op: str, *inputs: str, outputs: Sequence[str], **attributes: Any) -> list[str]:
        """An op with named outputs."""
        self.nodes.append(helper.make_node(op, list(inputs), list(outputs), name=outputs[0], **attributes))
        return list(outputs)

    def op(self, op: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """An op with one output, named after the op unless told otherwise."""
        return self.many(op, *inputs, outputs=[name or f"{op.lower()}_{len(self.nodes)}"], **attributes)[0]

    def linear(self, x: str, name: str, weight: Tensor, bias: Tensor | None = None) -> str:
        """`x @ weight.T + bias` of a torch `weight [out, in]`, stored transposed."""
        y = self.op("MatMul", x, self.weight(name + ".weight", weight.detach().t()))
        return y if bias is None else self.op("Add", y, self.weight(name + ".bias", bias))

    def reshape(self, x: str, *shape: int) -> str:
        """`x` in another shape; 0 keeps the size of that axis, -1 takes what is left."""
        return self.op("Reshape", x, self.ints(*shape))

    def transpose(self, x: str, *axes: int, name: str | None = None) -> str:
        """`x` with its axes in another order."""
        return self.op("Transpose", x, name=name, perm=axes)

    def model(self, name: str, inputs: Sequence[Value], outputs: Sequence[Value]) -> onnx.ModelProto:
        """The graph without its weights; `save_model` adds them."""
        graph = helper.make_graph(self.nodes, name, [v.proto() for v in inputs], [v.proto() for v in outputs])
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="lantern-rt"
        )


def take_weights(model: onnx.ModelProto) -> dict[str, Tensor]:
    """Remove the initialisers of a model and return them as tensors, for `save_model`."""
    weights = {t.name: torch.from_numpy(np.array(numpy_helper.to_array(t))) for t in model.graph.initializer}
    del model.graph.initializer[:]
    return weights


def halve_weights(model: onnx.ModelProto, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Store as float16, and cast back when the graph is loaded, what float16 holds without loss.

    The graph computes the same numbers from files of half the size.
    """
    stored, casts = {}, []
    for name, weight in weights.items():
        half = weight.half()
        if weight.dtype != torch.float32 or weight.ndim < 2 or not torch.equal(half.float(), weight):
            stored[name] = weight
            continue
        stored[f"{name}.half"] = half
        casts.append(helper.make_node("Cast", [f"{name}.half"], [name], name=f"{name}.cast", to=TensorProto.FLOAT))
    later = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*casts, *later])
    return stored


def save_model(model: onnx.ModelProto, weights: dict[str, Tensor], path: Path) -> list[Path]:
    """Write `path`, and `path.data` if the weights are larger than a megabyte; returns the files written."""
    data = path.with_name(path.name + ".data")
    external = sum(w.numel() * w.element_size() for w in weights.values()) > 1 << 20
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(data.open("wb")) if external else None
        for name, weight in weights.items():
            raw = np.ascontiguousarray(weight.detach().cpu().numpy())
            proto = model.graph.initializer.add(name=name, dims=weight.shape, data_type=_TYPES[weight.dtype])
            if out is None or raw.nbytes <= EXTERNAL_ABOVE:
                proto.raw_data = raw.tobytes()
                continue
            out.write(b"\0" * (-out.tell() % _ALIGNMENT))
            proto.data_location = TensorProto.EXTERNAL
            for key, value in {"location": data.name, "offset": str(out.tell()), "length": str(raw.nbytes)}.items():
                proto.external_data.add(key=key, value=value)
            out.write(raw.data)
    path.write_bytes(model.SerializeToString())
    return [path, data] if external else [path]
