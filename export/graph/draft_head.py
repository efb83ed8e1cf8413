"""A drafter that scores only some codes: its graph with the other columns of the head left out.

The head is most of a small drafter's weights. A code that it does not score gets a logit so low that its
probability is exactly 0: it is never drafted, and acceptance, which uses the probabilities that children were drawn
from, stays exact. Works on a bundle's graph, whatever the checkpoint was. Does not know which codes matter.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from ...errors import BundleError

ABSENT = -1e9  # a logit: its exponential is 0 beside any other, at any temperature that is allowed


def reduce_head(source: Path, goal: Path, codes: NDArray[np.int64], codebook: int) -> None:
    """Write the drafter graph `source` to `goal`, with a head for `codes` (ascending, distinct) out of `codebook`.

    Weights outside the graph go to `<goal>.data`. BundleError if the graph has no plain head of that size, or has been
    reduced before.
    """
    model = onnx.load(source)
    graph = model.graph
    head = next((node for node in graph.node if "logits" in node.output), None)
    stored = None if head is None or head.op_type != "MatMul" else _stored(graph, head.input[1])
    if head is None or stored is None or list(stored.dims)[1:] != [codebook]:
        raise BundleError(f"{source}: found no head for {codebook} codes; reduce the drafter of the original bundle")
    columns = np.ascontiguousarray(numpy_helper.to_array(stored)[:, codes])
    stored.CopyFrom(numpy_helper.from_array(columns, stored.name))
    head.output[0] = "drafted_logits"
    places = np.full(codebook, len(codes), np.int64)  # of the column behind the last
    places[codes] = np.arange(len(codes))
    graph.initializer.extend(
        [
            numpy_helper.from_array(np.array([0, 0, 0, 0, 0, 1], np.int64), "absent_column"),
            helper.make_tensor("absent_logit", TensorProto.FLOAT, [], [ABSENT]),
            numpy_helper.from_array(places, "code_columns"),
        ]
    )
    graph.node.extend(
        [
            helper.make_node("Pad", ["drafted_logits", "absent_column", "absent_logit"], ["all_logits"], "pad_logits"),
            helper.make_node("Gather", ["all_logits", "code_columns"], ["logits"], "place_logits", axis=2),
        ]
    )
    outside = source.with_name(source.name + ".data").exists()
    data = goal.with_name(goal.name + ".data")
    onnx.save(model, goal, save_as_external_data=outside, location=data.name, size_threshold=1024)
    if outside:
        data.chmod(goal.stat().st_mode)  # onnx makes it unreadable to others


def _stored(graph: onnx.GraphProto, name: str) -> onnx.TensorProto | None:
    """The initialiser behind a matrix, perhaps through a Cast."""
    cast = next((node for node in graph.node if name in node.output), None)
    if cast is not None:
        name = cast.input[0] if cast.op_type == "Cast" else ""
    return next((tensor for tensor in graph.initializer if tensor.name == name), None)
