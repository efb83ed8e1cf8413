"""Memory of caches on a device, used again by later caches of its shape, and passes that are bound to it for good.

A pass of a shape that comes again has its inputs and outputs at fixed places: nothing is bound or taken anew, and a
provider that can records it as one graph and replays that.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...runtime.engine import Ints
from ..contracts import Executable
from .device import Device, itemsize
from .providers import turn

_KEPT = 2  # slabs that no cache uses
_MOST_BOUND = 32  # passes of a slab: their outputs take memory, and recordings
_PLAIN = 2  # runs of a bound pass before it is recorded


class Bound:
    """One shape of a pass in memory of its own. number: of its runs, each of which overwrites `outputs`, by name.

    users: what refers to the outputs; while there are any, it must not be run.
    """

    def __init__(
        self, graph: Executable, device: Device, feeds: Mapping[str, Any], placed: Mapping[str, Any], record: int | None
    ) -> None:
        """feeds: arrays, which get a place on the device, or values there. placed: caches and outputs, values there.

        record: the number to record it by, None: it is run op by op.
        """
        self.number, self.outputs, self.record = 0, placed, record
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._provider = device.provider
        self._inputs = {name: device.put(one) for name, one in feeds.items() if isinstance(one, np.ndarray)}
        self._held = {**feeds, **self._inputs, **placed}
        self._run = graph.bind(self._held, record)

    def run(self, feeds: Mapping[str, Any]) -> None:
        """Run it on other arrays of the same shapes."""
        with turn(self._provider):
            for name, value in self._inputs.items():
                value.update_inplace(np.ascontiguousarray(feeds[name]))
            self._run(self.number >= _PLAIN)
        self.number += 1


class Part(NamedTuple):
    """One of several tensors, all of them of this size, that lie in a value one after the other."""

    whole: Any
    number: int
    size: list[int]

    def shape(self) -> list[int]:
        """As that of a value."""
        return self.size

    def data_ptr(self) -> int:
        """As that of a value."""
        return int(self.whole.data_ptr()) + self.number * prod(self.size) * itemsize(self.whole)


@dataclass(eq=False)
class Slab:
    """Key 0, value 0, key 1, ... of so many rows `[columns, width]`, and the passes bound to them."""

    shape: tuple[int, int, int]
    values: list[Any]
    bound: dict[tuple[int, ...], Bound] = field(default_factory=dict)


class Slabs:
    """The slabs of an engine. What nobody uses any more is kept for the next who needs it, but not much of it."""

    def __init__(self, device: Device, graph: Executable, tensors: int, dtype: str, heads: int | None) -> None:
        """heads: of a row, each with all columns; all tensors are then one value, which one operation reaches.

        None: columns have all heads, and every tensor is a value.
        """
        self.device, self._graph, self._dtype, self._heads = device, graph, dtype, heads
        self._values, self._stack = (1, tensors) if heads else (tensors, 1)
        self._kept: OrderedDict[int, Slab] = OrderedDict()  # the one given back longest ago first
        self._numbers = itertools.count(1)
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
        return [Part(value, number, size) for value in slab.values for number in range(self._stack)]

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

    def bound(self, slab: Slab, shape: tuple[int, ...], make: Callable[[int], Bound]) -> Bound:
        """A pass of this shape whose outputs nobody refers to; those used long ago make room.

        Made with a number to record it by if need be.
        """
        places = ((*shape, place) for place in itertools.count())
        key = next(one for one in places if one not in slab.bound or not slab.bound[one].users)
        bound = slab.bound.pop(key, None) or make(next(self._numbers))
        slab.bound[key] = bound
        if len(slab.bound) > _MOST_BOUND:
            self._drop(slab.bound.pop(next(iter(slab.bound))))
        return bound

    def _drop(self, bound: Bound) -> None:
        if bound.record is not None:
            self._graph.forget(bound.record)

    def _give_back(self, slab: Slab) -> None:
        with self._lock:
            self._kept[id(slab)] = slab
            surplus = [self._kept.popitem(last=False)[1] for _ in range(len(self._kept) - _KEPT)]
        for bound in (bound for old in surplus for bound in old.bound.values()):
            self._drop(bound)


@dataclass(eq=False)
class Lease:
    """The use of a slab, which ends when this is dropped."""

    slab: Slab
