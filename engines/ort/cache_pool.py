"""Memory of caches on a device, used again by later caches of its shape, and passes that are bound to it for good.

A pass of a shape that comes again has its inputs and outputs at fixed places: nothing is bound or taken anew, and a
provider that can records it as one graph and replays that.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...runtime.device import SampleRequest
from ...runtime.engine import Floats, Ints
from ...runtime.sampling import damaged
from ..columns import padded_node_count
from ..contracts import Array, Executable, Tensor, TensorView
from ..graph_writer import GraphWriter
from ..kv_cache import round_up
from ..sampling_head import FILTERED_OUT, SamplingHead
from .device import Device, GraphTensors

MAX_BOUND_PASSES = 32  # passes of a block: their outputs take memory, and recordings
_ALIGNED = 256  # bytes: where arrays of a buffer begin
_KEPT = 2  # pool that no cache uses
_MAX_SAMPLERS = 8  # heads of a bound pass


class UploadBuffer:
    """Memory for arrays that go up together: by one copy, where memory has addresses."""

    def __init__(self, device: Device, size: int) -> None:
        """size: bytes, `room` for each array."""
        self.device, self._bytes = device, np.zeros(size, np.uint8)
        self._value = device.put(self._bytes) if device.has_addresses else None

    @staticmethod
    def room(*arrays: Array) -> int:
        """Bytes that arrays take."""
        return sum(round_up(array.nbytes, _ALIGNED) for array in arrays)

    def place(self, arrays: Mapping[str, Array], start: int = 0) -> dict[str, Any]:
        """CacheColumns for arrays of these shapes, from a byte on, as inputs of graphs."""
        if self._value is None:
            return {name: self.device.put(array) for name, array in arrays.items()}
        places: dict[str, Any] = {}
        for name, array in arrays.items():
            places[name] = TensorView(self._value, start, list(array.shape), array.dtype.name)
            start += self.room(array)
        return places

    def fill(self, places: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Put arrays in their places, to be sent up."""
        for name, place in places.items():
            if isinstance(place, TensorView):
                self._bytes[place.start :][: arrays[name].nbytes] = arrays[name].ravel().view(np.uint8)
            else:
                place.update_inplace(np.ascontiguousarray(arrays[name]))

    def send(self) -> None:
        """Bring up what has been filled in."""

        def write(graph: GraphWriter) -> GraphTensors:
            graph.op("Identity", "data", name="out")
            data, out = (Tensor(name, ("uint8",), (None,)) for name in ("data", "out"))
            return [data], [out]

        if self._value is not None:
            self.device.run("send", write, {"data": self._bytes, "out": self._value}, wait=False)


class BoundSampler(NamedTuple):
    """A head bound to logits: the table whose noise it reads, places of its inputs, its output, and what runs it."""

    noise: Any
    inputs: dict[str, Any]
    drawn: Any
    run: Callable[[], None]


class BoundPass:
    """One shape of a pass in memory of its own, run once somebody asks for what comes of it: with a head, if that is
    codes. Each run overwrites `outputs`, by name.

    users: what refers to the outputs; while there are any, it must not be begun again.
    """

    def __init__(
        self, graph: Executable, device: Device, feeds: Mapping[str, Any], placed: Mapping[str, Any], record: bool
    ) -> None:
        """feeds: arrays, which get a place on the device, or values there. placed: caches and outputs, values there.

        record: whether it and its heads may be recorded.
        """
        self.device, self.outputs, self._record = device, placed, record
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._samplers: dict[tuple[Any, ...], BoundSampler] = {}
        self._waiting: list[tuple[Mapping[str, Any], object]] = []
        rows, self._nodes = feeds["token_ids"].shape
        arrays, self._start = _arrays(feeds), UploadBuffer.room(*_arrays(feeds).values())
        node = np.zeros(
            (rows, padded_node_count(self._nodes)), np.int32
        )  # of a head: three of these, and three of its rows
        self._buffer = UploadBuffer(device, self._start + 3 * UploadBuffer.room(node, node[:, 0]))
        self._inputs = self._buffer.place(arrays)
        self._run = graph.bind({**feeds, **self._inputs, **placed}, record)

    def begin(self, feeds: Mapping[str, Any], reads: object = None) -> None:
        """Another pass, on other arrays of the same shapes. reads: whose values it reads, held until it is run."""
        self._waiting = [(feeds, reads)]

    def finish(self) -> None:
        """Run it, unless it has been; everything is done then."""
        if self._waiting:
            with self.device.lock:
                self._launch()
                self.device.wait()

    def draw(self, head: SamplingHead, requests: Sequence[SampleRequest]) -> tuple[Ints, Floats]:
        """Codes and scores of all requests, `[requests, nodes, most]`, filled up to the nodes of the longest.

        If the pass has to be run, all goes up at once; codes alone come down.
        Raises: EngineError: the logits hold NaN or infinity.
        """
        with self.device.lock:
            feeds = self.device.samples(head, self._nodes, requests)
            sampler = self._sampler(head, feeds)
            self._buffer.fill(sampler.inputs, feeds)
            self._launch()
            sampler.run()
            codes, scores = sampler.drawn.numpy().copy()  # in the host's memory, the former is the value itself
        for own, one in zip(scores, requests, strict=True):
            if not np.isfinite(own[: len(one.positions), 0]).all():
                raise damaged()
        scores[scores <= FILTERED_OUT / 2] = -np.inf
        return codes.astype(np.int64), scores

    def _launch(self) -> None:
        waiting = self._waiting.pop() if self._waiting else None
        if waiting is not None:
            self._buffer.fill(self._inputs, waiting[0])
        self._buffer.send()
        if waiting is not None:
            self._run()

    def _sampler(self, head: SamplingHead, feeds: Mapping[str, Any]) -> BoundSampler:
        shape = feeds["conditional"].shape
        sampler, noise = self._samplers.pop((head, shape), None), feeds.get("noise")
        if sampler is None or sampler.noise is not noise:  # its table may have grown
            inputs = self._buffer.place(_arrays(feeds), self._start)
            drawn = self.device.empty((2, *shape, head.num_best), "float32")
            values = {**feeds, **inputs, "logits": self.outputs["logits"], "drawn": drawn}
            run = self.device.graph(head, head.write, records=True).bind(values, self._record)
            sampler = BoundSampler(noise, inputs, drawn, run)
        self._samplers[head, shape] = sampler
        if len(self._samplers) > _MAX_SAMPLERS:
            del self._samplers[next(iter(self._samplers))]
        return sampler


def _arrays(feeds: Mapping[str, Any]) -> dict[str, Array]:
    return {name: one for name, one in feeds.items() if isinstance(one, np.ndarray)}


@dataclass(eq=False)
class CacheBlock:
    """Key 0, value 0, key 1, ... of so many rows `[columns, width]`, and the passes bound to them."""

    shape: tuple[int, int, int]
    values: list[Any]
    bound: dict[tuple[int, ...], BoundPass] = field(default_factory=dict)


class CachePool:
    """The pool of an engine. What nobody uses any more is kept for the next who needs it, but not much of it."""

    def __init__(self, device: Device, tensors: int, dtype: str, width: int, heads: int | None) -> None:
        """heads: of a row, each with all columns; all tensors are then one value, which one operation reaches.

        None: columns have all heads, and every tensor is a value. width: of a column, of one head or of all.
        """
        self.device, self._dtype, self._width, self._heads = device, dtype, width, heads
        self._values, self._stack = (1, tensors) if heads else (tensors, 1)
        self._kept: OrderedDict[int, CacheBlock] = OrderedDict()  # the one given back longest ago first
        self._lock = threading.RLock()  # one may be given back while another is taken, on the same thread too

    def take(self, rows: int, columns: int) -> BlockHandle:
        """A block of so many columns, of each head or of all, with finite numbers."""
        shape = rows, columns * (self._heads or 1), self._width
        with self._lock:
            block = next((block for block in list(self._kept.values()) if block.shape == shape), None)
            self._kept.pop(id(block), None)
        if block is None:
            stacked = self._stack * shape[0], *shape[1:]
            block = CacheBlock(shape, [self.device.zeros(stacked, self._dtype) for _ in range(self._values)])
        lease = BlockHandle(block)
        weakref.finalize(lease, self._give_back, block).atexit = False
        return lease

    def tensors(self, block: CacheBlock) -> list[Any]:
        """All tensors, as values or `[rows, heads, columns, width]`."""
        if self._heads is None:
            return block.values
        rows, lines, width = block.shape
        size = [rows, self._heads, lines // self._heads, width]
        bytes_each = prod(size) * np.dtype(self._dtype).itemsize
        starts = [number * bytes_each for number in range(self._stack)]
        return [TensorView(value, start, size, self._dtype) for value in block.values for start in starts]

    def copy(self, block: CacheBlock, rows: Ints, goal: CacheBlock, first: int = 0) -> None:
        """Write rows of a block to those of another from `first` on."""
        every, places = np.arange(self._stack)[:, None], first + np.arange(len(rows))
        chosen, into = ((every * one.shape[0] + own).ravel() for one, own in ((block, rows), (goal, places)))
        for value, target in zip(block.values, goal.values, strict=True):
            self.device.copy_rows(value, chosen, target, into)

    def move(self, block: CacheBlock, sources: Ints, targets: Ints, steps: Ints) -> None:
        """Copy entries `[some, 2]` (row, column) within all tensors; again with `steps [any]` added to the columns."""
        rows = np.repeat(np.arange(self._stack) * block.shape[0], len(steps))
        for value in block.values:
            self.device.move(value, sources, targets, np.stack([rows, np.tile(steps, self._stack)], 1))

    def bound(self, block: CacheBlock, shape: tuple[int, ...], make: Callable[[], BoundPass]) -> BoundPass:
        """A pass of this shape whose outputs nobody refers to, made if need be; those used long ago make room."""
        places = ((*shape, place) for place in itertools.count())
        key = next(one for one in places if one not in block.bound or not block.bound[one].users)
        bound = block.bound.pop(key, None) or make()
        block.bound[key] = bound
        if len(block.bound) > MAX_BOUND_PASSES:
            del block.bound[next(iter(block.bound))]
        return bound

    def _give_back(self, block: CacheBlock) -> None:
        with self._lock:
            self._kept[id(block)] = block
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)


@dataclass(eq=False)
class BlockHandle:
    """The use of a block, which ends when this is dropped."""

    block: CacheBlock
