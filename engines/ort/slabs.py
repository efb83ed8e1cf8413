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
from typing import Any

import numpy as np

from ..host import import_onnxruntime
from .device import Device
from .providers import turn
from .session import GraphSession

_KEPT = 2  # slabs that no cache uses
_MOST_BOUND = 32  # passes of a slab: their outputs take memory, and recordings
_PLAIN = 2  # runs of a bound pass before it is recorded
_UNRECORDED = -1


class Bound:
    """One shape of a pass on one cache's memory. number: of its runs, each of which overwrites the outputs."""

    def __init__(
        self,
        graph: GraphSession,
        device: Device,
        feeds: Mapping[str, Any],
        tensors: Mapping[str, Any],
        outputs: Mapping[str, Any],
        record: int | None,
    ) -> None:
        """feeds: arrays, which get a place on the device, or values there. outputs: values by name.

        tensors: caches by the name of the input; the output of that name is in the same memory. record: the number to
        record it by, None: it is run op by op.
        """
        self.number, self.outputs, self.record = 0, outputs, record
        self._graph, self._provider, self._binding = graph, device.provider, graph.session.io_binding()
        self._inputs = {name: device.put(one) for name, one in feeds.items() if isinstance(one, np.ndarray)}
        self._given = {**feeds, **self._inputs, **tensors}  # held, as bindings hold memory but not values
        for name, value in self._given.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, value in {**outputs, **{_present(name): one for name, one in tensors.items()}}.items():
            self._binding.bind_ortvalue_output(name, value)
        self._options = _run_options(_UNRECORDED), _run_options(_UNRECORDED if record is None else record)

    def run(self, feeds: Mapping[str, Any]) -> None:
        """Run it on other arrays of the same shapes."""
        with turn(self._provider, alone=self.record is not None and self.number == _PLAIN):
            for name, value in self._inputs.items():
                value.update_inplace(np.ascontiguousarray(feeds[name]))
            self._graph.run_bound(self._binding, self._options[self.number >= _PLAIN])
        self.number += 1


@dataclass(eq=False)
class Slab:
    """Key 0, value 0, key 1, ... of as many rows and columns as `shape` says, and the passes bound to them."""

    shape: tuple[int, ...]
    tensors: list[Any]
    bound: dict[object, Bound] = field(default_factory=dict)


class Slabs:
    """The slabs of an engine. What nobody uses any more is kept for the next who needs it, but not much of it."""

    def __init__(self, device: Device, tensors: int, dtype: str, forget: Callable[[int], None]) -> None:
        """forget: told of the numbers of recorded passes that will not be run again."""
        self.device, self._tensors, self._dtype, self._forget = device, tensors, dtype, forget
        self._kept: OrderedDict[int, Slab] = OrderedDict()  # the one given back longest ago first
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()  # one may be given back while another is taken, on the same thread too

    def take(self, shape: tuple[int, ...]) -> Lease:
        """A slab `[rows, columns, width]` of finite numbers."""
        with self._lock:
            found = next((slab for slab in list(self._kept.values()) if slab.shape == shape), None)
            self._kept.pop(id(found), None)
        if found is None:
            found = Slab(shape, [self.device.zeros(shape, self._dtype) for _ in range(self._tensors)])
        lease = Lease(found)
        weakref.finalize(lease, self._give_back, found).atexit = False
        return lease

    def bound(self, slab: Slab, key: object, make: Callable[[int], Bound]) -> Bound:
        """The pass of this key, made with a number to record it by if need be; those used long ago make room."""
        found = slab.bound.pop(key, None) or make(next(self._numbers))
        slab.bound[key] = found
        if len(slab.bound) > _MOST_BOUND:
            self._drop(slab.bound.pop(next(iter(slab.bound))))
        return found

    def _drop(self, bound: Bound) -> None:
        if bound.record is not None:
            self._forget(bound.record)

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


def run_once(
    graph: GraphSession, device: Device, feeds: Mapping[str, Any], tensors: Mapping[str, Any], outputs: Sequence[str]
) -> list[Any]:
    """Run a pass whose shape may not come again; returns new values on the device for `outputs`. As `Bound`."""
    binding = graph.session.io_binding()
    for name, value in {**feeds, **tensors}.items():
        if isinstance(value, np.ndarray):
            binding.bind_cpu_input(name, value)
        else:
            binding.bind_ortvalue_input(name, value)
    for name in outputs:
        binding.bind_output(name, device.name)
    for name, tensor in tensors.items():
        binding.bind_ortvalue_output(_present(name), tensor)
    graph.run_bound(binding, _run_options(_UNRECORDED))
    return list(binding.get_outputs()[: len(outputs)])


def _present(name: str) -> str:
    return name.replace("past", "present", 1)


def _run_options(graph: int) -> Any:
    options = import_onnxruntime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    return options
