"""What happens on a provider's device besides running decoders: small graphs, and the noise that lies there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...runtime.device import SampleRequest
from ...runtime.engine import Floats, Ints
from ...runtime.noise import GROUP, Noise
from ...runtime.sampling import damaged
from ..columns import node_count
from ..contracts import Array, Tensor
from ..graph_writer import GraphWriter
from ..host import import_onnxruntime
from ..sampling_head import LEFT_OUT, Head
from .providers import find_provider, turn
from .session import load_session

_DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}
_GROUPS = 32  # of positions whose noise is kept on the device, at least


class Device:
    """The device of a provider; values there are ONNX Runtime's. For several threads."""

    def __init__(self, provider: str) -> None:
        own = find_provider(provider, import_onnxruntime())
        self.provider, self.name = provider, own.memory
        self.records, self.plain = bool(own.recording), own.plain
        self._sessions: dict[object, tuple[Any, list[str]]] = {}  # with the names of their outputs
        self._noise: dict[int, NoiseTable] = {}  # by vocabulary
        self._lock = threading.Lock()

    def run(
        self, key: object, graph: Callable[[], bytes], feeds: Mapping[str, Any], goals: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Run a helper graph, made when it is first needed; feeds are arrays, or values on the device.

        goals: values that outputs are written to, None for the host's memory; others get new values on the device.
        """
        if key not in self._sessions:
            helper = load_session(graph(), 1, self.provider)
            self._sessions[key] = helper, [output.name for output in helper.get_outputs()]
        session, names = self._sessions[key]
        goals = goals or {}
        binding, arrays = session.io_binding(), list[Array]()  # held while they are read
        for name, value in feeds.items():
            if isinstance(value, np.ndarray):
                arrays.append(np.ascontiguousarray(value))
                binding.bind_cpu_input(name, arrays[-1])
            else:
                binding.bind_ortvalue_input(name, value)
        for name in names:
            if goals.get(name) is not None:
                binding.bind_ortvalue_output(name, goals[name])
            else:
                binding.bind_output(name, "cpu" if name in goals else self.name)
        with turn(self.provider):
            session.run_with_iobinding(binding)
        outputs = zip(names, binding.get_outputs(), strict=True)
        return [value.numpy() if name in goals and goals[name] is None else value for name, value in outputs]

    def put(self, array: Array) -> Any:
        """A copy of an array on the device."""
        with turn(self.provider):
            return import_onnxruntime().OrtValue.ortvalue_from_numpy(array, self.name, 0)

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """A value on the device that holds anything."""
        values = import_onnxruntime().OrtValue
        with turn(self.provider):
            return values.ortvalue_from_shape_and_type(list(shape), np.dtype(dtype).type, self.name, 0)

    def zeros(self, shape: Sequence[int], dtype: str) -> Any:
        """Zeros on the device, made there."""

        def graph() -> bytes:
            writer = GraphWriter()
            writer.op("Expand", writer.constant(np.zeros(1, dtype)), "shape", name="out")
            return writer.to_bytes(
                [Tensor("shape", ("int64",), (len(shape),))], [Tensor("out", (dtype,), (None,) * len(shape))]
            )

        return self.run(("zeros", len(shape), dtype), graph, {"shape": np.array(shape, np.int64)})[0]

    def read(self, value: Any, places: Ints) -> Floats:
        """Rows `places` (of any shape) of a value `[rows, nodes, width]`, its first two axes taken as one; float32."""
        dtype, width = dtype_of(value), value.shape()[2]

        def graph() -> bytes:
            writer = GraphWriter()
            flat = writer.op("Reshape", "data", writer.ints(-1, width))
            writer.op("Gather", flat, "places", name="out")
            inputs = [Tensor("data", (dtype,), (None, None, width)), Tensor("places", ("int64",), (None,))]
            return writer.to_bytes(inputs, [Tensor("out", (dtype,), (None, width))])

        feeds = {"data": value, "places": places.ravel()}
        (flat,) = self.run(("read", dtype, width), graph, feeds, {"out": None})
        rows: Floats = flat.reshape(*places.shape, width).astype(np.float32, copy=False)
        return rows

    def copy_rows(self, value: Any, rows: Ints, goal: Any, places: Ints) -> None:
        """Write `rows [some]` of a value `[rows, columns, width]` to `places [some]` of one of no fewer columns.

        The value may be an array.
        """
        dtype, width = dtype_of(goal), goal.shape()[2]
        columns = (value.shape if isinstance(value, np.ndarray) else value.shape())[1]

        def graph() -> bytes:
            writer = GraphWriter()
            padded = writer.op("Pad", writer.op("Gather", "data", "rows"), "pads")
            writer.op("ScatterND", "goal", "places", padded, name="out")
            inputs = [Tensor(name, (dtype,), (None, None, width)) for name in ("data", "goal")]
            for name, shape in (("rows", (None,)), ("places", (None, 1)), ("pads", (6,))):
                inputs.append(Tensor(name, ("int64",), shape))
            return writer.to_bytes(inputs, [Tensor("out", (dtype,), (None, None, width))])

        pads = np.array([0, 0, 0, 0, goal.shape()[1] - columns, 0], np.int64)
        feeds = {"data": value, "rows": rows, "places": places[:, None], "pads": pads, "goal": goal}
        self.run(("copy", dtype, width), graph, feeds, {"out": goal})

    def move(self, value: Any, sources: Ints, targets: Ints, steps: Ints) -> None:
        """Within a value `[rows, columns, width]`, copy what is at `sources [some, 2]` (row, column) to `targets`.

        All at once, so that nothing is overwritten before it is read; again with each of `steps [any, 2]` added.
        """
        dtype, width = dtype_of(value), value.shape()[2]

        def graph() -> bytes:
            writer = GraphWriter()
            every = writer.constant(steps[:, None])  # [any, 1, 2]
            moved = writer.op("GatherND", "data", writer.op("Add", every, "sources"))
            writer.op("ScatterND", "data", writer.op("Add", every, "targets"), moved, name="out")
            cache, ids = (None, None, width), ("int64",)
            inputs = [Tensor("data", (dtype,), cache), *(Tensor(n, ids, (None, 2)) for n in ("sources", "targets"))]
            return writer.to_bytes(inputs, [Tensor("out", (dtype,), cache)])

        feeds = {"data": value, "sources": sources, "targets": targets}
        self.run(("move", dtype, width, steps.tobytes()), graph, feeds, {"out": value})

    def draw(self, head: Head, logits: Any, requests: Sequence[SampleRequest]) -> tuple[Ints, Floats]:
        """Codes and scores of all requests, `[requests, nodes, most]`, filled up to the nodes of the longest.

        Raises: EngineError: the logits hold NaN or infinity.
        """
        nodes = node_count(max(len(one.positions) for one in requests))
        sides, width = np.zeros((2, len(requests), nodes), np.int32), logits.shape()[1]
        numbers = np.ones((3, len(requests), 1, 1), np.float32)
        for i, one in enumerate(requests):
            count, last = one.nodes.shape[1], len(one.nodes) - 1  # without guidance both sides are the same row
            for side, row in ((0, 0), (1, last)):
                sides[side, i, :count] = (one.rows.start + row) * width + one.nodes[row]
            numbers[:, i, 0, 0] = one.sampling.cfg_scale, one.sampling.temperature or 1.0, one.sampling.top_p
        feeds = {"logits": logits, "conditional": sides[0], "unconditional": sides[1]}
        names = ("cfg_scale", "temperature", "top_p") if head.top_p else ("cfg_scale", "temperature")
        feeds |= dict(zip(names, numbers, strict=False))
        with self._lock:
            if head.noisy:
                table = self._noise.setdefault(head.vocab_size, NoiseTable(self, head.vocab_size))
                feeds["noise_ids"] = table.ids(requests, nodes)
                feeds["noise"] = table.value
            codes, scores = self.run(head, head.graph, feeds, {"codes": None, "scores": None})
        for own, one in zip(scores, requests, strict=True):
            if not np.isfinite(own[: len(one.positions), 0]).all():
                raise damaged()
        scores[scores <= LEFT_OUT / 2] = -np.inf
        return codes, scores


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
        """Room for so many groups, all of it free."""
        self.value = self.device.zeros((groups, GROUP, self.size), "float32")
        self._places, self._free = {}, list(range(groups))


def dtype_of(value: Any) -> str:
    """The NumPy name of a value's type."""
    return _DTYPES[value.data_type()]


def itemsize(value: Any) -> int:
    """Bytes of one of a value's numbers."""
    return np.dtype(dtype_of(value)).itemsize
