"""Vectors that depend only on class and position (RAR), computed for blocks of positions instead of in each pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...bundle.decoder import EXPORT_AGAIN
from ...bundle.manifest import DecoderSpec
from ...bundle.onnx_scan import read_graph_nodes, read_graph_weights
from ...errors import BundleError
from ...inputs import convert_read_errors
from ...runtime.engine import Ints
from ..contracts import Array, TensorSpec
from ..decoder_tensors import get_hidden_dtype
from ..graph_writer import MODULATION, GraphWriter
from ..kv_cache import KVCache
from .session import GraphSession

_BLOCK = 16  # number of position ids in a block, whose vectors take twice as long as those of 2 ids


class PositionVectors:
    """Part of a decoder graph that computes the vectors `tensors` of position ids, which the other part gets as inputs.

    This part has a third of the weights, which are therefore not read in each pass.
    """

    def __init__(self, path: Path, spec: DecoderSpec, threads: int | None) -> None:
        self._last_id = spec.max_positions - 1
        dtypes = (get_hidden_dtype(spec.dtype),)
        with convert_read_errors(path, "an ONNX graph", BundleError, EXPORT_AGAIN):
            self._weights = read_graph_weights(path)
            self._opset, self._nodes = read_graph_nodes(path)
            self.tensors = [
                TensorSpec(inputs[0], dtypes, ("nodes", "rows", spec.hidden_size * len(outputs)))
                for _, inputs, outputs in self._nodes
                if outputs[0].endswith(f"{MODULATION}.0")
            ]
        ids = [TensorSpec("position_ids", ("int64",), ("rows", "nodes"))]
        graph = self.extract_graph(ids, self.tensors)
        self._session = GraphSession(path, ids, self.tensors, threads, model_bytes=graph)

    def extract_graph(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bytes:
        """Write the part of the decoder graph that computes `outputs` from `inputs`."""
        given = {tensor.name for tensor in inputs}
        needed = {tensor.name for tensor in outputs}
        messages = []
        for message, node_inputs, node_outputs in reversed(self._nodes):
            if not needed.isdisjoint(node_outputs):
                messages.append(message)
                needed.update(set(node_inputs) - given)
        graph = GraphWriter({"": self._opset}, messages[::-1])
        graph.weights = {name: weight.tensor_message for name, weight in self._weights.items() if name in needed}
        return graph.to_bytes(inputs, outputs)

    def look_up(self, positions: Ints, cache: KVCache) -> dict[str, Array]:
        """Return the vectors of nodes at `positions [rows, nodes]`; the cache keeps the blocks of the nodes."""
        nodes = [divmod(position, _BLOCK) for position in positions.T.ravel().tolist()]
        needed = {block for block, _ in nodes}
        blocks = cache.position_vectors
        if not needed <= blocks.keys():
            blocks = {block: blocks.get(block) or self._compute_block(block) for block in needed}
            cache.position_vectors = blocks
        shape = (*positions.T.shape, -1)
        return {
            tensor.name: np.stack([blocks[block][i][offset] for block, offset in nodes]).reshape(shape)
            for i, tensor in enumerate(self.tensors)
        }

    def _compute_block(self, block: int) -> list[Array]:
        ids = np.arange(_BLOCK * block, _BLOCK * (block + 1))
        return self._session.run({"position_ids": np.minimum(ids, self._last_id)[None]})
