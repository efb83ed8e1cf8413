"""Decoders whose keys and values, logits and hidden states stay on a device, the same way with every provider.

Up go ids, positions and a few bits a node, and noise once per position; down come codes. With provider `cpu` the device
is the host's memory. An engine may serve several threads, each with caches of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...bundle.manifest import DecoderSpec, DrafterSpec
from ...methods import Sampling
from ...runtime.device import Asked, DeviceLogits
from ...runtime.engine import Cache, Floats, Ints, Pass, PassOutput, Taken
from ..columns import ColumnCache, Lying, read_by_nodes
from ..decoder_tensors import past_length_of
from ..device_graph import device_graph
from ..kv_cache import CacheRows
from ..sampling_head import Head
from .device import Device, dtype_of
from .session import GraphSession
from .slabs import Bound, Lease, Slabs, run_once

MOST_NODES = 64  # of a row, in passes whose shapes come again


@dataclass
class DeviceCache(ColumnCache):
    """Keys and values on a device."""

    slabs: Slabs
    lease: Lease
    turn: int = 0  # which of two places the outputs of the next pass go to

    def keep_rows(self, rows: Ints) -> None:
        """Keep only these rows, in this order; copied on the device."""
        before = self.lease  # held until it has been read
        self.lease = self.slabs.take((len(rows), *before.slab.shape[1:]))
        for tensor, goal in zip(before.slab.tensors, self.lease.slab.tensors, strict=True):
            self.slabs.device.take_rows(tensor, rows, goal)
        self.select(rows)

    def extend(self, other: Cache) -> None:
        """Take in the rows of another cache; copied on the device."""
        added, mine = DeviceCache.own(other), self.lease  # held until it has been read
        self.join_rows(added)
        self.lease = self.slabs.take((len(self.lengths), self.columns, mine.slab.shape[2]))
        tensors = (lease.slab.tensors for lease in (mine, added.lease, self.lease))
        for first, second, goal in zip(*tensors, strict=True):
            self.slabs.device.join(first, second, goal)


class DeviceRows(Lying):
    """Rows `[rows, nodes, width]` on a device. Indexing the first two axes copies just those rows, as float32.

    bound: the pass whose output they are, which overwrites them when it runs again; None: nothing does. lease: held,
    so that no other cache runs it meanwhile.
    """

    def __init__(self, device: Device, value: Any, bound: Bound | None = None, lease: Lease | None = None) -> None:
        self.home, self.device, self.bound, self._value, self._lease = device, device, bound, value, lease
        self.dtype, self.stride = dtype_of(value), value.shape()[1]
        self._number = 0 if bound is None else bound.number

    @property
    def value(self) -> Any:
        """All of them. Raises: ValueError once they are overwritten."""
        if self.bound is not None and self.bound.number != self._number:
            raise ValueError("outputs of a pass that has been run again since")
        return self._value

    def __getitem__(self, key: Any) -> Floats:
        value = self.value
        rows, nodes, _ = value.shape()
        places: Ints = np.arange(rows * nodes).reshape(rows, nodes)[key]
        return self.device.read(value, places)


class LogitRows(DeviceRows, DeviceLogits):
    """Logits of a pass, with codes drawn on the device."""

    def draws(self, sampling: Sampling) -> bool:
        """Whether there is a graph for these settings."""
        return Head.can(sampling)

    def best(self, asked: Sequence[Asked], most: int) -> list[tuple[Ints, Floats]]:
        """As the runtime's `best_codes` on the host, up to rounding; those with the same filters are drawn at once."""
        vocab_size = self.value.shape()[2]
        heads = [Head.of(one.sampling, vocab_size, most, one.noise is not None) for one in asked]
        found: dict[int, tuple[Ints, Floats]] = {}
        for head in dict.fromkeys(heads):
            own = [i for i, other in enumerate(heads) if other == head]
            codes, scores = self.device.draw(head, self.value, [asked[i] for i in own])
            for place, i in enumerate(own):
                count = len(asked[i].positions)
                found[i] = codes[place, :count], scores[place, :count]
        return [found[i] for i in range(len(asked))]


class OrtDeviceEngine:
    """A decoder graph in the device layout. With a table of code embeddings it is a target; without, a drafter."""

    def __init__(
        self, path: Path, spec: DecoderSpec | DrafterSpec, code_embeddings: Floats | None, threads: int, device: Device
    ) -> None:
        made = device_graph(path, spec, drafts=code_embeddings is None, plain=device.plain)
        self._graph = GraphSession(
            path, made.inputs, made.outputs, threads, device.provider, model=made.model, records=True
        )
        self.spec, self.device, self._dtype = spec, device, made.dtype
        self._table = None if code_embeddings is None else device.put(code_embeddings.astype(made.dtype))
        past = [tensor.name for tensor in made.inputs if tensor.name.startswith("past_")]
        self._past, self._column_ids = past, dict[int, Any]()  # by number of columns
        self._slabs = Slabs(device, len(past), made.dtype, self._graph.session.release_captured_graph)

    def new_cache(self, rows: int, capacity: int) -> DeviceCache:
        """An empty cache in the device's memory, all of it taken at once."""
        lengths = np.zeros(rows, np.int64)
        shape = (rows, ColumnCache(lengths, capacity).columns, self.spec.num_kv_heads * self.spec.head_dim)
        return DeviceCache(lengths, capacity, self._slabs, self._slabs.take(shape))

    def next_past_length(self, cache: Cache, nodes: int) -> int:
        """The longest row, rounded up."""
        return CacheRows.own(cache).past_length()

    def run(self, batch: Pass, cache: Cache) -> PassOutput:
        """Run one pass; logits and hidden states come back as rows on the device."""
        own = DeviceCache.own(cache)
        past_length_of(batch, own)
        start, encoded = time.perf_counter(), own.encode(batch)
        nodes = encoded["seen"].shape[1]
        if own.columns not in self._column_ids:
            self._column_ids[own.columns] = self.device.put(np.arange(own.columns, dtype=np.int32))
        read = read_by_nodes(batch, nodes, self._table, self._dtype, self.device)
        feeds = {**encoded, **read, "column_ids": self._column_ids[own.columns]}
        tensors, names = dict(zip(self._past, own.lease.slab.tensors, strict=True)), self._graph.output_names[:2]
        bound = self._bound(own, batch, feeds, tensors)
        if bound is None:
            logits, hidden = run_once(self._graph, self.device, feeds, tensors, names)
        else:
            bound.run(feeds)
            logits, hidden = (bound.outputs[name] for name in names)
        own.seconds += time.perf_counter() - start
        own.passes += 1
        lease = None if bound is None else own.lease
        rows = LogitRows(self.device, logits, bound, lease), DeviceRows(self.device, hidden, bound, lease)
        return PassOutput(*rows, own.written)

    def _bound(
        self, cache: DeviceCache, batch: Pass, feeds: Mapping[str, Any], tensors: Mapping[str, Any]
    ) -> Bound | None:
        """The pass of this shape on the cache's memory; None for those that will hardly come again.

        Outputs go to two places in turn, so that a pass may read those of the one before.
        """
        rows, nodes, words = feeds["seen"].shape
        hidden = batch.hidden
        lasting = hidden is None or (isinstance(hidden, Taken) and getattr(hidden.source, "bound", None) is not None)
        if nodes > MOST_NODES or batch.embeds is not None or not lasting:
            return None
        cache.turn = 1 - cache.turn

        def make(number: int) -> Bound:
            spec, empty = self.spec, self.device.empty
            outputs = {
                "logits": empty((rows, nodes, spec.vocab_size), "float32"),
                "hidden_states": empty((rows, nodes, spec.hidden_size), self._dtype),
            }
            return Bound(self._graph, self.device, feeds, tensors, outputs, number if self.device.records else None)

        key = (cache.turn, nodes, words, id(feeds.get("hidden")))
        return self._slabs.bound(cache.lease.slab, key, make)
