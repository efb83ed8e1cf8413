"""Decoders whose keys and values, logits and hidden states stay on a device, the same way with every provider.

Up go ids, positions and a few bits a node, and noise once per position; down come codes. With provider `cpu` the device
is the host's memory. An engine may serve several threads, each with caches of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...bundle.manifest import DecoderSpec, DrafterSpec
from ...methods import Sampling
from ...runtime.device import Asked, DeviceLogits, Resident
from ...runtime.engine import Cache, Floats, Ints, Pass, PassOutput, Taken
from ..columns import ColumnCache, fill_up
from ..decoder_tensors import past_length_of
from ..device_graph import device_graph
from ..kv_cache import CacheRows
from ..sampling_head import Head
from .device import Device
from .session import GraphSession


@dataclass
class DeviceCache(ColumnCache):
    """Keys and values on a device, values `[rows, columns, num_kv_heads * head_dim]`: key 0, value 0, key 1, ..."""

    device: Device
    tensors: list[Any]

    def keep_rows(self, rows: Ints) -> None:
        """Keep only these rows, in this order; copied on the device."""
        self.tensors = [self.device.take_rows(tensor, rows) for tensor in self.tensors]
        self.select(rows)

    def extend(self, other: Cache) -> None:
        """Take in the rows of another cache; copied on the device."""
        added = DeviceCache.own(other)
        columns = max(self.columns, added.columns)
        pairs = zip(self.tensors, added.tensors, strict=True)
        self.tensors = [self.device.join(mine, its, columns) for mine, its in pairs]
        self.join_rows(added)


class DeviceRows(Resident):
    """Rows `[rows, nodes, width]` on a device. Indexing the first two axes copies just those rows, as float32."""

    def __init__(self, device: Device, value: Any) -> None:
        self.device, self.value = device, value

    def __getitem__(self, key: Any) -> Floats:
        rows, nodes, _ = self.value.shape()
        places: Ints = np.arange(rows * nodes).reshape(rows, nodes)[key]
        return self.device.read(self.value, places)


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
        made = device_graph(path, spec, drafts=code_embeddings is None)
        self._graph = GraphSession(path, made.inputs, made.outputs, threads, device.provider, model=made.model)
        self.spec, self.device, self._dtype = spec, device, made.dtype
        self._drafts = code_embeddings is None
        self._table = None if code_embeddings is None else device.put(code_embeddings.astype(made.dtype))
        self._past = [tensor.name for tensor in made.inputs if tensor.name.startswith("past_")]
        self._column_ids: dict[int, Any] = {}  # by number of columns

    def new_cache(self, rows: int, capacity: int) -> DeviceCache:
        """An empty cache in the device's memory, all of it taken at once."""
        cache = DeviceCache(np.zeros(rows, np.int64), capacity, self.device, [])
        shape = (rows, cache.columns, self.spec.num_kv_heads * self.spec.head_dim)
        cache.tensors = [self.device.zeros(shape, self._dtype) for _ in self._past]
        return cache

    def next_past_length(self, cache: Cache, nodes: int) -> int:
        """The longest row, rounded up."""
        return CacheRows.own(cache).past_length()

    def run(self, batch: Pass, cache: Cache) -> PassOutput:
        """Run one pass; logits and hidden states come back as rows on the device."""
        own = DeviceCache.own(cache)
        past_length_of(batch, own)
        feeds = own.encode(batch)
        nodes = feeds["seen"].shape[1]
        if own.columns not in self._column_ids:
            self._column_ids[own.columns] = self.device.put(np.arange(own.columns, dtype=np.int32))
        start, binding = time.perf_counter(), self._graph.session.io_binding()
        for name, value in {**feeds, **self._read(batch, nodes), "column_ids": self._column_ids[own.columns]}.items():
            if isinstance(value, np.ndarray):
                binding.bind_cpu_input(name, value)
            else:
                binding.bind_ortvalue_input(name, value)
        for name in self._graph.output_names[:2]:
            binding.bind_output(name, self.device.name)
        for name, tensor in zip(self._past, own.tensors, strict=True):
            binding.bind_ortvalue_input(name, tensor)
            binding.bind_ortvalue_output(name.replace("past", "present", 1), tensor)  # the same memory
        self._graph.run_bound(binding)
        own.seconds += time.perf_counter() - start
        own.passes += 1
        logits, hidden = binding.get_outputs()[:2]
        return PassOutput(LogitRows(self.device, logits), DeviceRows(self.device, hidden), own.written)

    def _read(self, batch: Pass, nodes: int) -> dict[str, Any]:
        """What nodes read, filled up to so many of a row."""
        if not self._drafts:
            if batch.tokens is not None and batch.embeds is None:
                return {"embeddings": self._table, "token_ids": fill_up(batch.tokens, nodes, np.int32)}
            if batch.tokens is not None or batch.embeds is None:
                raise ValueError("a target reads either `tokens` or `embeds`")
            rows, given, width = batch.embeds.shape  # a prefix is a table of its own
            ids = np.arange(rows * given).reshape(rows, given)
            table = np.ascontiguousarray(batch.embeds.reshape(-1, width), self._dtype)
            return {"embeddings": table, "token_ids": fill_up(ids, nodes, np.int32)}
        if batch.tokens is None or batch.hidden is None:
            raise ValueError("a drafter reads `tokens` and `hidden`")
        tokens = {"token_ids": fill_up(batch.tokens, nodes, np.int32)}
        taken = batch.hidden
        if isinstance(taken, Taken) and isinstance(taken.source, DeviceRows) and taken.source.device is self.device:
            ids = taken.rows * taken.source.value.shape()[1] + taken.nodes
            return {**tokens, "hidden": taken.source.value, "hidden_ids": fill_up(ids, nodes, np.int32)}
        hidden = taken.read() if isinstance(taken, Taken) else taken
        rows, given, width = hidden.shape
        ids = np.arange(rows * given).reshape(rows, given)
        states = np.ascontiguousarray(hidden.reshape(1, -1, width), self._dtype)
        return {**tokens, "hidden": states, "hidden_ids": fill_up(ids, nodes, np.int32)}
