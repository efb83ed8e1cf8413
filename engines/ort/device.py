"""What happens on a provider's device besides running decoders: small graphs, and the noise that lies there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import EngineError
from ...inputs import brief
from ...runtime.device import SampleRequest
from ...runtime.engine import Floats, Ints
from ...runtime.noise import GROUP, Noise
from ...runtime.sampling import damaged
from ..columns import node_count
from ..contracts import Array, Part, Tensor
from ..graph_writer import GraphWriter
from ..host import import_onnxruntime
from ..kv_cache import round_up
from ..sampling_head import LEFT_OUT, Head
from .providers import find_provider, turn
from .session import GraphSession, load_session, run_options

_DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}
_GROUPS = 32  # of positions whose noise is kept on the device, at least
_ALIGNED = 256  # bytes: where arrays of a buffer begin
_MOST_RECORDED = 1024  # passes and heads, where what was recorded stays until the process ends
_UNLIMITED = 1 << 31
PLAIN = 2  # runs of what is bound for good before it is recorded


class Device:
    """The device of a provider; values there are ONNX Runtime's. For several threads."""

    def __init__(self, provider: str) -> None:
        own = find_provider(provider, import_onnxruntime())
        self.provider, self.name = provider, own.memory
        self.plain, self.addressed = own.plain, own.addressed
        most = 0 if not own.recording else _UNLIMITED if own.forgets else _MOST_RECORDED
        self._records = iter(range(1, most + 1))
        self.lock = threading.RLock()  # held while codes are drawn, and taken before the provider's `turn`
        self._sessions: dict[object, tuple[Any, list[str]]] = {}  # with the names of their outputs
        self._heads: dict[Head, GraphSession] = {}
        self._noise: dict[int, NoiseTable] = {}  # by vocabulary
        self._token: Any = None

    def run(
        self,
        key: object,
        graph: Callable[[], bytes],
        feeds: Mapping[str, Any],
        goals: Mapping[str, Any] | None = None,
        wait: bool = True,
    ) -> list[Any]:
        """Run a helper graph, made when it is first needed; feeds are arrays, or values on the device.

        goals: values that outputs are written to, None for the host's memory; others get new values on the device.
        wait: until it is done.
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
            try:
                session.run_with_iobinding(binding, None if wait else run_options())
            except Exception as error:
                problem, remedy = f"its device fails ({brief(error, 200)})", "use another, or export in float32"
                raise EngineError(problem, field=f"provider {self.provider}", remedy=remedy) from error
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
        with self.lock, turn(self.provider):
            feeds = self.samples(head, logits.shape()[1], requests)
            buffer = Buffer(self, Buffer.room(*(one for one in feeds.values() if isinstance(one, np.ndarray))))
            drawing = Drawing(buffer, 0, head, logits, feeds, None)
            drawing.fill(feeds)
            buffer.send()
            return drawing.run(requests)

    def samples(self, head: Head, width: int, requests: Sequence[SampleRequest]) -> dict[str, Any]:
        """What a head reads besides logits, which are those of passes over `width` nodes; to be called with `lock`."""
        nodes = node_count(max(len(one.positions) for one in requests))
        sides = np.zeros((2, len(requests), nodes), np.int32)
        numbers = np.ones((3, len(requests), 1, 1), np.float32)
        for i, one in enumerate(requests):
            count, last = one.nodes.shape[1], len(one.nodes) - 1  # without guidance both sides are the same row
            for side, row in ((0, 0), (1, last)):
                sides[side, i, :count] = (one.rows.start + row) * width + one.nodes[row]
            numbers[:, i, 0, 0] = one.sampling.cfg_scale, one.sampling.temperature or 1.0, one.sampling.top_p
        feeds: dict[str, Any] = {"conditional": sides[0], "unconditional": sides[1]}
        feeds |= zip(("cfg_scale", "temperature", "top_p")[: 2 + head.top_p], numbers, strict=False)
        if head.noisy:
            table = self._noise.setdefault(head.vocab_size, NoiseTable(self, head.vocab_size))
            feeds["noise_ids"] = table.ids(requests, nodes)
            feeds["noise"] = table.value
        return feeds

    def head(self, head: Head) -> GraphSession:
        """The graph that draws codes, loaded when it is first needed."""
        if head not in self._heads:
            model, inputs, outputs = head.graph()
            where = Path("the graph that draws codes")
            self._heads[head] = GraphSession(where, inputs, outputs, 1, self.provider, model, records=True)
        return self._heads[head]

    def record(self) -> int | None:
        """A new number to record something by; None: run it op by op, as nothing is recorded, or not any more."""
        return next(self._records, None)

    def wait(self) -> None:
        """Wait until everything that this thread has asked for is done."""
        if self._token is None:
            self._token = self.put(np.zeros(1, np.float32))
        self._token.numpy()


class Buffer:
    """Memory for arrays that go up, or come down, together: by one copy, where memory has addresses."""

    def __init__(self, device: Device, size: int) -> None:
        """size: bytes, `room` for each array."""
        self.device, self._bytes = device, np.zeros(size, np.uint8)
        self._value = device.put(np.zeros(size, np.uint8)) if device.addressed else None

    @staticmethod
    def room(*arrays: Array) -> int:
        """Bytes that arrays take."""
        return sum(round_up(array.nbytes, _ALIGNED) for array in arrays)

    def place(self, arrays: Mapping[str, Array], start: int = 0) -> dict[str, Any]:
        """Places for arrays of these shapes, from a byte on, as inputs or outputs of graphs."""
        if self._value is None:
            return {name: self.device.put(array) for name, array in arrays.items()}
        places: dict[str, Any] = {}
        for name, array in arrays.items():
            places[name] = Part(self._value, start, list(array.shape), array.dtype.name)
            start += self.room(array)
        return places

    def fill(self, places: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Put arrays in their places, to be sent up."""
        for name, place in places.items():
            if isinstance(place, Part):
                self._view(place)[...] = arrays[name]
            else:
                place.update_inplace(np.ascontiguousarray(arrays[name]))

    def send(self) -> None:
        """Bring up what has been filled in."""
        if self._value is not None:
            self.device.run("send", _identity, {"data": self._bytes}, {"out": self._value}, wait=False)

    def read(self, places: Mapping[str, Any]) -> list[Array]:
        """Copies of what is in places on the device, when it has done all that it was asked for."""
        if self._value is None:
            return [place.numpy() for place in places.values()]
        self._bytes = self._value.numpy().copy()  # in host memory, the former is the value itself
        return [self._view(place) for place in places.values()]

    def _view(self, place: Part) -> Array:
        size = prod(place.size) * np.dtype(place.dtype).itemsize
        array: Array = self._bytes[place.start : place.start + size].view(place.dtype).reshape(place.size)
        return array


def _identity() -> bytes:
    writer = GraphWriter()
    writer.op("Identity", "data", name="out")
    data, out = (Tensor(name, ("uint8",), (None,)) for name in ("data", "out"))
    return writer.to_bytes([data], [out])


class Drawing:
    """A head bound to logits, for requests of one shape. What it reads goes up in a buffer, from a byte on."""

    def __init__(
        self, buffer: Buffer, start: int, head: Head, logits: Any, feeds: Mapping[str, Any], record: int | None
    ) -> None:
        """feeds: as `Device.samples` has them. record: the number to record it by, None: it is run op by op."""
        device = buffer.device
        self._buffer, self._graph, self.record, self._runs = buffer, device.head(head), record, 0
        self._inputs = buffer.place({name: one for name, one in feeds.items() if isinstance(one, np.ndarray)}, start)
        shape = (*feeds["conditional"].shape, head.most)
        results: dict[str, Array] = {"codes": np.zeros(shape, np.int64), "scores": np.zeros(shape, np.float32)}
        self._results = Buffer(device, Buffer.room(*results.values()))
        self._outputs = self._results.place(results)
        self.held = {"logits": logits, **feeds, **self._inputs, **self._outputs}
        self._run = self._graph.bind(self.held, record)

    def fill(self, feeds: Mapping[str, Any]) -> None:
        """Put what it reads into the buffer."""
        self._buffer.fill(self._inputs, feeds)

    def run(self, requests: Sequence[SampleRequest]) -> tuple[Ints, Floats]:
        """Codes and scores, when what it reads has been sent; as `Device.draw`."""
        self._run(self._runs >= PLAIN)
        self._runs += 1
        codes, scores = self._results.read(self._outputs)
        for own, one in zip(scores, requests, strict=True):
            if not np.isfinite(own[: len(one.positions), 0]).all():
                raise damaged()
        scores[scores <= LEFT_OUT / 2] = -np.inf
        return codes, scores

    def forget(self) -> None:
        """It will not be run again."""
        if self.record is not None:
            self._graph.forget(self.record)


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
