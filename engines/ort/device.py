"""Operations on a provider's device besides decoders: helper graphs, and noise in the device's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...runtime.device import SampleRequest
from ...runtime.engine import Floats, Ints
from ...runtime.noise import GROUP_SIZE, Noise
from ..columns import padded_node_count
from ..contracts import Array, Tensor
from ..graph_writer import GraphWriter
from ..host import import_onnxruntime
from ..sampling_head import SamplingHead
from .providers import DEVICE_LOCKS, find_provider
from .session import GraphSession

_DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}
_MIN_GROUPS = 32  # minimum number of groups of positions in a noise table
GraphTensors = tuple[list[Tensor], list[Tensor]]  # inputs and outputs of a graph


class Device:
    """The device of a provider, with memory in ONNX Runtime's values. Threads use it one at a time, holding `lock`."""

    def __init__(self, provider: str) -> None:
        chosen = find_provider(provider, import_onnxruntime())
        self.provider = provider
        self.name = chosen.memory
        self.basic_ops = chosen.basic_ops
        self.has_addresses = chosen.has_addresses
        self.lock = DEVICE_LOCKS[provider]
        self._graphs: dict[object, GraphSession] = {}
        self._noise: dict[int, NoiseTable] = {}  # keys are vocabulary sizes
        self._token: Any = None

    def graph(self, key: object, write: Callable[[GraphWriter], GraphTensors], records: bool = False) -> GraphSession:
        """Return a helper graph, which is written and loaded at first use.

        Args:
            key: key of the graph.
            write: function that writes the graph and returns its inputs and outputs.
            records: whether runs of the graph may be recorded.
        """
        if key not in self._graphs:
            writer = GraphWriter()
            where = Path(f"helper graph {key}")
            inputs, outputs = write(writer)
            model = writer.to_bytes(inputs, outputs)
            self._graphs[key] = GraphSession(where, inputs, outputs, 1, self.provider, model, records)
        return self._graphs[key]

    def run(
        self, key: object, write: Callable[[GraphWriter], GraphTensors], values: Mapping[str, Any], wait: bool = True
    ) -> None:
        """Run a helper graph.

        Args:
            key: key of the graph, as for `graph`.
            write: function that writes the graph, as for `graph`.
            values: inputs and outputs by name, values on the device; inputs may be arrays.
            wait: whether to wait until the device has run the graph.
        """
        with self.lock:
            self.graph(key, write).bind(values)()
            if wait:
                self.wait()

    def put(self, array: Array) -> Any:
        """Copy an array to the device."""
        with self.lock:
            return import_onnxruntime().OrtValue.ortvalue_from_numpy(array, self.name, 0)

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """Allocate a value on the device, uninitialised."""
        values = import_onnxruntime().OrtValue
        with self.lock:
            return values.ortvalue_from_shape_and_type(list(shape), np.dtype(dtype).type, self.name, 0)

    def zeros(self, shape: Sequence[int], dtype: str) -> Any:
        """Return a value of zeros, computed on the device."""

        def write(graph: GraphWriter) -> GraphTensors:
            graph.op("Expand", graph.constant(np.zeros(1, dtype)), "shape", name="out")
            return [Tensor("shape", ("int64",), (len(shape),))], [Tensor("out", (dtype,), (None,) * len(shape))]

        out = self.empty(shape, dtype)
        self.run(("zeros", len(shape), dtype), write, {"shape": np.array(shape, np.int64), "out": out})
        return out

    def read(self, value: Any, indices: Ints) -> Floats:
        """Copy vectors of a value to the host, as float32.

        Args:
            value: value `[rows, nodes, width]`.
            indices: indices in the flattened first two axes of `value`, of any shape.
        """
        dtype = dtype_of(value)
        width = value.shape()[2]

        def write(graph: GraphWriter) -> GraphTensors:
            graph.op("Gather", graph.reshape("data", -1, width), "indices", name="out")
            inputs = [Tensor("data", (dtype,), (None, None, width)), Tensor("indices", ("int64",), (None,))]
            return inputs, [Tensor("out", (dtype,), (None, width))]

        with self.lock:
            out = self.empty((indices.size, width), dtype)
            self.run(("read", dtype, width), write, {"data": value, "indices": indices.ravel(), "out": out}, wait=False)
            rows: Floats = out.numpy().reshape(*indices.shape, width).astype(np.float32)
        return rows

    def copy_rows(self, value: Any, rows: Ints, target: Any, target_rows: Ints) -> None:
        """Copy rows of a value to another value; columns that `value` does not have become zeros.

        Args:
            value: value or array `[rows, columns, width]`.
            rows: rows to copy.
            target: value with at least as many columns as `value`.
            target_rows: rows to overwrite.
        """
        dtype = dtype_of(target)
        width = target.shape()[2]
        columns = (value.shape if isinstance(value, np.ndarray) else value.shape())[1]

        def write(graph: GraphWriter) -> GraphTensors:
            padded = graph.op("Pad", graph.op("Gather", "data", "rows"), "pads")
            graph.op("ScatterND", "target", "places", padded, name="out")
            inputs = [Tensor(name, (dtype,), (None, None, width)) for name in ("data", "target")]
            for name, shape in (("rows", (None,)), ("places", (None, 1)), ("pads", (6,))):
                inputs.append(Tensor(name, ("int64",), shape))
            return inputs, [Tensor("out", (dtype,), (None, None, width))]

        pads = np.array([0, 0, 0, 0, target.shape()[1] - columns, 0], np.int64)
        values = {
            "data": value,
            "rows": rows,
            "places": target_rows[:, None],
            "pads": pads,
            "target": target,
            "out": target,
        }
        self.run(("copy", dtype, width), write, values)

    def move(self, value: Any, sources: Ints, targets: Ints, steps: Ints) -> None:
        """Copy vectors within a value; all vectors are read before the first is overwritten.

        Args:
            value: value `[rows, columns, width]`.
            sources: row and column of the vectors to copy, `[vectors, 2]`.
            targets: row and column of the vectors to overwrite.
            steps: offsets of row and column for which the copy is repeated, `[steps, 2]`.
        """
        dtype = dtype_of(value)
        width = value.shape()[2]

        def write(graph: GraphWriter) -> GraphTensors:
            offsets = graph.constant(steps[:, None])  # [steps, 1, 2]
            moved = graph.op("GatherND", "data", graph.op("Add", offsets, "sources"))
            graph.op("ScatterND", "data", graph.op("Add", offsets, "targets"), moved, name="out")
            cache = (None, None, width)
            ids = ("int64",)
            inputs = [Tensor("data", (dtype,), cache), *(Tensor(n, ids, (None, 2)) for n in ("sources", "targets"))]
            return inputs, [Tensor("out", (dtype,), cache)]

        values = {"data": value, "sources": sources, "targets": targets, "out": value}
        self.run(("move", dtype, width, steps.tobytes()), write, values)

    def sampling_inputs(self, head: SamplingHead, width: int, requests: Sequence[SampleRequest]) -> dict[str, Any]:
        """Return the inputs of a sampling graph, except the logits. The caller holds `lock`.

        Args:
            head: settings of the graph.
            width: number of nodes per row of the pass, with padding.
            requests: nodes and settings of each image.
        """
        nodes = padded_node_count(max(len(request.positions) for request in requests))
        logit_ids = np.zeros((2, len(requests), nodes), np.int32)  # conditional and unconditional
        scales = np.ones((len(requests), nodes, 1), np.float32)
        numbers = np.ones((2, len(requests), 1, 1), np.float32)
        for i, request in enumerate(requests):
            count = request.nodes.shape[1]
            last = len(request.nodes) - 1  # 0 without guidance
            for guidance, row in ((0, 0), (1, last)):
                logit_ids[guidance, i, :count] = (request.rows.start + row) * width + request.nodes[row]
            sampling = request.sampling
            scales[i, :count, 0] = sampling.last_cfg_scale if request.scales is None else request.scales
            numbers[:, i, 0, 0] = sampling.temperature or 1.0, sampling.top_p
        feeds: dict[str, Any] = {"conditional": logit_ids[0], "unconditional": logit_ids[1], "cfg_scale": scales}
        feeds |= zip(("temperature", "top_p")[: 1 + head.top_p], numbers, strict=False)
        if head.add_noise:
            table = self._noise.setdefault(head.vocab_size, NoiseTable(self, head.vocab_size))
            feeds["noise_ids"] = table.ids(requests, nodes)
            feeds["noise"] = table.value
        return feeds

    def wait(self) -> None:
        """Wait until the device has done all work of this thread."""
        if self._token is None:
            self._token = self.put(np.zeros(1, np.float32))
        self._token.numpy()


class NoiseTable:
    """Noise on a device, `[groups, GROUP_SIZE, vocab_size]`; new groups replace the least recently used.

    Args:
        device: device of the table.
        size: number of tokens, `vocab_size`.
    """

    def __init__(self, device: Device, size: int) -> None:
        self.device = device
        self.size = size
        self.value = None
        # Keys are a seed and a group of positions, the least recently used first.
        self._indices: dict[tuple[int, int], int] = {}
        self._free: list[int] = []

    def ids(self, requests: Sequence[SampleRequest], nodes: int) -> Array:
        """Return the index of every node's noise, int32 `[requests, nodes]`; upload the noise if necessary."""
        needed: dict[tuple[int, int], Noise] = {}
        spans = [
            (int(request.positions.min()) // GROUP_SIZE, int(request.positions.max()) // GROUP_SIZE + 1)
            for request in requests
        ]
        for request, span in zip(requests, spans, strict=True):
            if request.noise is not None:
                needed |= {(request.noise.seed, group): request.noise for group in range(*span)}
        if len(needed) > len(self._indices) + len(self._free):
            self._allocate(max(_MIN_GROUPS, 2 * len(needed)))
        self._indices |= {key: self._indices.pop(key) for key in needed if key in self._indices}
        for key in [key for key in needed if key not in self._indices]:
            index = self._free.pop() if self._free else self._indices.pop(next(iter(self._indices)))
            self._indices[key] = index
            noise = np.asarray(needed[key].gumbel(key[1] * GROUP_SIZE, GROUP_SIZE, self.size), np.float32)
            self.device.copy_rows(noise[None], np.array([0]), self.value, np.array([index]))
        ids = np.zeros((len(requests), nodes), np.int32)
        for row, request, span in zip(ids, requests, spans, strict=True):
            if request.noise is not None:
                positions = request.positions
                indices = np.array([self._indices[request.noise.seed, group] for group in range(*span)])
                row[: len(positions)] = indices[positions // GROUP_SIZE - span[0]] * GROUP_SIZE + positions % GROUP_SIZE
        return ids

    def _allocate(self, groups: int) -> None:
        self.value = self.device.zeros((groups, GROUP_SIZE, self.size), "float32")
        self._indices = {}
        self._free = list(range(groups))


def dtype_of(value: Any) -> str:
    """Return the NumPy name of a value's type."""
    return _DTYPES[value.data_type()]
