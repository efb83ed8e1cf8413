"""What happens on a provider's device besides running decoders: small graphs, and the noise that lies there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...runtime.device import SampleRequest
from ...runtime.engine import Floats, Ints
from ...runtime.noise import GROUP, Noise
from ..columns import padded_node_count
from ..contracts import Array, Tensor
from ..graph_writer import GraphWriter
from ..host import import_onnxruntime
from ..sampling_head import SamplingHead
from .providers import DEVICE_LOCKS, find_provider
from .session import GraphSession

_DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}
_GROUPS = 32  # of positions whose noise is kept on the device, at least
GraphTensors = tuple[list[Tensor], list[Tensor]]  # inputs and outputs of a graph


class Device:
    """The device of a provider; values there are ONNX Runtime's. For several threads, each in its `turn`."""

    def __init__(self, provider: str) -> None:
        own = find_provider(provider, import_onnxruntime())
        self.provider, self.name = provider, own.memory
        self.plain, self.has_addresses = own.plain, own.has_addresses
        self.lock = DEVICE_LOCKS[provider]
        self._graphs: dict[object, GraphSession] = {}
        self._noise: dict[int, NoiseTable] = {}  # by vocabulary
        self._token: Any = None

    def graph(self, key: object, write: Callable[[GraphWriter], GraphTensors], records: bool = False) -> GraphSession:
        """A helper graph, written and loaded when it is first needed."""
        if key not in self._graphs:
            writer, where = GraphWriter(), Path(f"helper graph {key}")
            inputs, outputs = write(writer)
            model = writer.to_bytes(inputs, outputs)
            self._graphs[key] = GraphSession(where, inputs, outputs, 1, self.provider, model, records)
        return self._graphs[key]

    def run(
        self, key: object, write: Callable[[GraphWriter], GraphTensors], values: Mapping[str, Any], wait: bool = True
    ) -> None:
        """Run a helper graph on values on the device; inputs may be arrays. wait: until it is done."""
        with self.lock:
            self.graph(key, write).bind(values)()
            if wait:
                self.wait()

    def put(self, array: Array) -> Any:
        """A copy of an array on the device."""
        with self.lock:
            return import_onnxruntime().OrtValue.ortvalue_from_numpy(array, self.name, 0)

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """A value on the device that holds anything."""
        values = import_onnxruntime().OrtValue
        with self.lock:
            return values.ortvalue_from_shape_and_type(list(shape), np.dtype(dtype).type, self.name, 0)

    def zeros(self, shape: Sequence[int], dtype: str) -> Any:
        """Zeros on the device, made there."""

        def write(graph: GraphWriter) -> GraphTensors:
            graph.op("Expand", graph.constant(np.zeros(1, dtype)), "shape", name="out")
            return [Tensor("shape", ("int64",), (len(shape),))], [Tensor("out", (dtype,), (None,) * len(shape))]

        out = self.empty(shape, dtype)
        self.run(("zeros", len(shape), dtype), write, {"shape": np.array(shape, np.int64), "out": out})
        return out

    def read(self, value: Any, places: Ints) -> Floats:
        """Rows `places` (of any shape) of a value `[rows, nodes, width]`, its first two axes taken as one; float32."""
        dtype, width = dtype_of(value), value.shape()[2]

        def write(graph: GraphWriter) -> GraphTensors:
            graph.op("Gather", graph.reshape("data", -1, width), "places", name="out")
            inputs = [Tensor("data", (dtype,), (None, None, width)), Tensor("places", ("int64",), (None,))]
            return inputs, [Tensor("out", (dtype,), (None, width))]

        with self.lock:
            out = self.empty((places.size, width), dtype)
            self.run(("read", dtype, width), write, {"data": value, "places": places.ravel(), "out": out}, wait=False)
            rows: Floats = out.numpy().reshape(*places.shape, width).astype(np.float32)
        return rows

    def copy_rows(self, value: Any, rows: Ints, goal: Any, places: Ints) -> None:
        """Write `rows [some]` of a value `[rows, columns, width]` to `places [some]` of one of no fewer columns.

        The value may be an array.
        """
        dtype, width = dtype_of(goal), goal.shape()[2]
        columns = (value.shape if isinstance(value, np.ndarray) else value.shape())[1]

        def write(graph: GraphWriter) -> GraphTensors:
            padded = graph.op("Pad", graph.op("Gather", "data", "rows"), "pads")
            graph.op("ScatterND", "goal", "places", padded, name="out")
            inputs = [Tensor(name, (dtype,), (None, None, width)) for name in ("data", "goal")]
            for name, shape in (("rows", (None,)), ("places", (None, 1)), ("pads", (6,))):
                inputs.append(Tensor(name, ("int64",), shape))
            return inputs, [Tensor("out", (dtype,), (None, None, width))]

        pads = np.array([0, 0, 0, 0, goal.shape()[1] - columns, 0], np.int64)
        values = {"data": value, "rows": rows, "places": places[:, None], "pads": pads, "goal": goal, "out": goal}
        self.run(("copy", dtype, width), write, values)

    def move(self, value: Any, sources: Ints, targets: Ints, steps: Ints) -> None:
        """Within a value `[rows, columns, width]`, copy what is at `sources [some, 2]` (row, column) to `targets`.

        All at once, so that nothing is overwritten before it is read; again with each of `steps [any, 2]` added.
        """
        dtype, width = dtype_of(value), value.shape()[2]

        def write(graph: GraphWriter) -> GraphTensors:
            every = graph.constant(steps[:, None])  # [any, 1, 2]
            moved = graph.op("GatherND", "data", graph.op("Add", every, "sources"))
            graph.op("ScatterND", "data", graph.op("Add", every, "targets"), moved, name="out")
            cache, ids = (None, None, width), ("int64",)
            inputs = [Tensor("data", (dtype,), cache), *(Tensor(n, ids, (None, 2)) for n in ("sources", "targets"))]
            return inputs, [Tensor("out", (dtype,), cache)]

        values = {"data": value, "sources": sources, "targets": targets, "out": value}
        self.run(("move", dtype, width, steps.tobytes()), write, values)

    def samples(self, head: SamplingHead, width: int, requests: Sequence[SampleRequest]) -> dict[str, Any]:
        """What a head reads besides logits, which are those of passes over `width` nodes; to be called in turn."""
        nodes = padded_node_count(max(len(one.positions) for one in requests))
        sides = np.zeros((2, len(requests), nodes), np.int32)
        numbers = np.ones((3, len(requests), 1, 1), np.float32)
        for i, one in enumerate(requests):
            count, last = one.nodes.shape[1], len(one.nodes) - 1  # without guidance both sides are the same row
            for side, row in ((0, 0), (1, last)):
                sides[side, i, :count] = (one.rows.start + row) * width + one.nodes[row]
            numbers[:, i, 0, 0] = one.sampling.cfg_scale, one.sampling.temperature or 1.0, one.sampling.top_p
        feeds: dict[str, Any] = {"conditional": sides[0], "unconditional": sides[1]}
        feeds |= zip(("cfg_scale", "temperature", "top_p")[: 2 + head.top_p], numbers, strict=False)
        if head.add_noise:
            table = self._noise.setdefault(head.vocab_size, NoiseTable(self, head.vocab_size))
            feeds["noise_ids"] = table.ids(requests, nodes)
            feeds["noise"] = table.value
        return feeds

    def wait(self) -> None:
        """Wait until everything that this thread has asked for is done."""
        if self._token is None:
            self._token = self.put(np.zeros(1, np.float32))
        self._token.numpy()


class NoiseTable:
    """Noise on a device, `[groups, GROUP, vocab_size]`, by groups of positions; those used last stay."""

    def __init__(self, device: Device, size: int) -> None:
        self.device, self.size, self.value = device, size, None
        self._places: dict[tuple[int, int], int] = {}  # of groups by seed, the one used longest ago first
        self._free: list[int] = []

    def ids(self, requests: Sequence[SampleRequest], nodes: int) -> Array:
        """Where the noise of every node is, int32 `[requests, nodes]`; brings up what is not there."""
        needed: dict[tuple[int, int], Noise] = {}
        spans = [(int(one.positions.min()) // GROUP, int(one.positions.max()) // GROUP + 1) for one in requests]
        for one, span in zip(requests, spans, strict=True):
            if one.noise is not None:
                needed |= {(one.noise.seed, group): one.noise for group in range(*span)}
        if len(needed) > len(self._places) + len(self._free):
            self._take(max(_GROUPS, 2 * len(needed)))
        self._places |= {key: self._places.pop(key) for key in needed if key in self._places}
        for key in [key for key in needed if key not in self._places]:
            place = self._free.pop() if self._free else self._places.pop(next(iter(self._places)))
            self._places[key] = place
            noise = np.asarray(needed[key].gumbel(key[1] * GROUP, GROUP, self.size), np.float32)
            self.device.copy_rows(noise[None], np.array([0]), self.value, np.array([place]))
        ids = np.zeros((len(requests), nodes), np.int32)
        for row, one, span in zip(ids, requests, spans, strict=True):
            if one.noise is not None:
                places = np.array([self._places[one.noise.seed, group] for group in range(*span)])
                row[: len(one.positions)] = places[one.positions // GROUP - span[0]] * GROUP + one.positions % GROUP
        return ids

    def _take(self, groups: int) -> None:
        self.value = self.device.zeros((groups, GROUP, self.size), "float32")
        self._places, self._free = {}, list(range(groups))


def dtype_of(value: Any) -> str:
    """The NumPy name of a value's type."""
    return _DTYPES[value.data_type()]
