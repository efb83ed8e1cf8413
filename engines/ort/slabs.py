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
from typing import Any

import numpy as np

from ...runtime.device import SampleRequest
from ...runtime.engine import Floats, Ints
from ..columns import node_count
from ..contracts import Executable, Part
from ..sampling_head import Head
from .device import PLAIN, Buffer, Device, Drawing
from .providers import turn

_KEPT = 2  # slabs that no cache uses
_MOST_BOUND = 32  # passes of a slab: their outputs take memory, and recordings
_MOST_DRAWINGS = 8  # heads of a bound pass


class Bound:
    """One shape of a pass in memory of its own. number: of its runs, each of which overwrites `outputs`, by name.

    users: what refers to the outputs; while there are any, it must not be run.
    """

    def __init__(
        self,
        graph: Executable,
        device: Device,
        feeds: Mapping[str, Any],
        placed: Mapping[str, Any],
        record: int | None,
        in_turn: bool = False,
    ) -> None:
        """feeds: arrays, which get a place on the device, or values there. placed: caches and outputs, values there.

        record: the number to record it by, None: it is run op by op. in_turn: else it needs its inputs there.
        """
        self.number, self.outputs, self.record, self._in_turn = 0, placed, record, in_turn
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.device, self._graph, self._drawings = device, graph, dict[tuple[Any, ...], Drawing]()
        arrays = {name: one for name, one in feeds.items() if isinstance(one, np.ndarray)}
        rows, self.nodes = feeds["token_ids"].shape
        node = np.zeros((rows, node_count(self.nodes)), np.int32)  # of a head: three of these, and three of its rows
        self._start = Buffer.room(*arrays.values())
        self._buffer = Buffer(device, self._start + 3 * Buffer.room(node, node[:, 0]))
        self._inputs = self._buffer.place(arrays)
        self._held = {**feeds, **self._inputs, **placed}
        self._run = graph.bind(self._held, record)

    def run(self, feeds: Mapping[str, Any]) -> None:
        """Run it on other arrays of the same shapes; nobody waits for what comes of it."""
        with turn(self.device.provider):
            self._buffer.fill(self._inputs, feeds)
            self._buffer.send()
            if not self._in_turn:
                self.device.wait()
            self._run(self.number >= PLAIN)
        self.number += 1

    def draw(self, feeds: Mapping[str, Any], head: Head, requests: Sequence[SampleRequest]) -> tuple[Ints, Floats]:
        """Run it, and draw codes from its logits, as `Device.draw`: all goes up at once, codes alone come down."""
        device, logits = self.device, self.outputs["logits"]
        with device.lock, turn(device.provider):
            more = device.samples(head, self.nodes, requests)
            key = head, more["conditional"].shape
            drawing = self._drawings.get(key)
            if drawing is None or drawing.held.get("noise") is not more.get("noise"):  # whose table may have grown
                if drawing is not None or len(self._drawings) == _MOST_DRAWINGS:
                    self._drawings.pop(key if drawing else next(iter(self._drawings))).forget()
                record = None if self.record is None else device.record()
                drawing = self._drawings[key] = Drawing(self._buffer, self._start, head, logits, more, record)
            drawing.fill(more)
            self.run(feeds)
            return drawing.run(requests)

    def forget(self) -> None:
        """It will not be run again."""
        if self.record is not None:
            self._graph.forget(self.record)
        for drawing in self._drawings.values():
            drawing.forget()


class Launch:
    """A pass that is run once somebody asks for what comes of it: with a head, if that is codes."""

    def __init__(self, bound: Bound, feeds: Mapping[str, Any], reads: object) -> None:
        """reads: whose values the pass reads, held until it is run."""
        self.bound, self._feeds, self._reads = bound, [feeds], [reads]

    def __call__(self) -> None:
        """Run it, unless it has been; everything is done then."""
        if self._feeds:
            with turn(self.bound.device.provider):
                self.bound.run(self._feeds.pop())
                self.bound.device.wait()
            self._reads.clear()

    def draw(self, head: Head, requests: Sequence[SampleRequest]) -> tuple[Ints, Floats]:
        """Run it and draw, as `Bound.draw`; or only draw, if it has been run."""
        if not self._feeds:
            return self.bound.device.draw(head, self.bound.outputs["logits"], requests)
        drawn = self.bound.draw(self._feeds.pop(), head, requests)
        self._reads.clear()
        return drawn


@dataclass(eq=False)
class Slab:
    """Key 0, value 0, key 1, ... of so many rows `[columns, width]`, and the passes bound to them."""

    shape: tuple[int, int, int]
    values: list[Any]
    bound: dict[tuple[int, ...], Bound] = field(default_factory=dict)


class Slabs:
    """The slabs of an engine. What nobody uses any more is kept for the next who needs it, but not much of it."""

    def __init__(self, device: Device, tensors: int, dtype: str, heads: int | None) -> None:
        """heads: of a row, each with all columns; all tensors are then one value, which one operation reaches.

        None: columns have all heads, and every tensor is a value.
        """
        self.device, self._dtype, self._heads = device, dtype, heads
        self._values, self._stack = (1, tensors) if heads else (tensors, 1)
        self._kept: OrderedDict[int, Slab] = OrderedDict()  # the one given back longest ago first
        self._lock = threading.RLock()  # one may be given back while another is taken, on the same thread too

    def take(self, shape: tuple[int, int, int]) -> Lease:
        """A slab `[rows, columns, width]` of finite numbers."""
        with self._lock:
            slab = next((slab for slab in list(self._kept.values()) if slab.shape == shape), None)
            self._kept.pop(id(slab), None)
        if slab is None:
            stacked = self._stack * shape[0], *shape[1:]
            slab = Slab(shape, [self.device.zeros(stacked, self._dtype) for _ in range(self._values)])
        lease = Lease(slab)
        weakref.finalize(lease, self._give_back, slab).atexit = False
        return lease

    def tensors(self, slab: Slab) -> list[Any]:
        """All tensors, as values or `[rows, heads, columns, width]`."""
        if self._heads is None:
            return slab.values
        rows, lines, width = slab.shape
        size = [rows, self._heads, lines // self._heads, width]
        bytes_each = prod(size) * np.dtype(self._dtype).itemsize
        starts = [number * bytes_each for number in range(self._stack)]
        return [Part(value, start, size, self._dtype) for value in slab.values for start in starts]

    def copy(self, slab: Slab, rows: Ints, goal: Slab, first: int = 0) -> None:
        """Write rows of a slab to those of another from `first` on."""
        every, places = np.arange(self._stack)[:, None], first + np.arange(len(rows))
        chosen, into = ((every * one.shape[0] + own).ravel() for one, own in ((slab, rows), (goal, places)))
        for value, target in zip(slab.values, goal.values, strict=True):
            self.device.copy_rows(value, chosen, target, into)

    def move(self, slab: Slab, sources: Ints, targets: Ints, steps: Ints) -> None:
        """Copy entries `[some, 2]` (row, column) within all tensors; again with `steps [any]` added to the columns."""
        rows = np.repeat(np.arange(self._stack) * slab.shape[0], len(steps))
        for value in slab.values:
            self.device.move(value, sources, targets, np.stack([rows, np.tile(steps, self._stack)], 1))

    def bound(self, slab: Slab, shape: tuple[int, ...], make: Callable[[], Bound]) -> Bound:
        """A pass of this shape whose outputs nobody refers to, made if need be; those used long ago make room."""
        places = ((*shape, place) for place in itertools.count())
        key = next(one for one in places if one not in slab.bound or not slab.bound[one].users)
        bound = slab.bound.pop(key, None) or make()
        slab.bound[key] = bound
        if len(slab.bound) > _MOST_BOUND:
            slab.bound.pop(next(iter(slab.bound))).forget()
        return bound

    def _give_back(self, slab: Slab) -> None:
        with self._lock:
            self._kept[id(slab)] = slab
            surplus = [self._kept.popitem(last=False)[1] for _ in range(len(self._kept) - _KEPT)]
        for bound in (bound for old in surplus for bound in old.bound.values()):
            bound.forget()


@dataclass(eq=False)
class Lease:
    """The use of a slab, which ends when this is dropped."""

    slab: Slab
