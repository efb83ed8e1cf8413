"""Decoders whose keys and values, logits and hidden states stay on a device, the same way with every library.

Up go ids, positions and a few bits a node, and noise once per position; down come codes. Memory, and all work besides
decoding, are ONNX Runtime's (`ort/device.py`); decoders are its graphs, or plans of TensorRT. An engine may serve
several threads, each with caches of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..bundle.manifest import DecoderSpec, DrafterSpec
from ..methods import Sampling
from ..runtime.device import DeviceLogits, SampleRequest
from ..runtime.engine import Cache, Floats, HiddenView, Ints, Pass, PassOutput
from .columns import CacheColumns, pad_nodes
from .contracts import STORAGE_DTYPES, Array, Executable, Tensor
from .decoder_tensors import checked_past_length, rows_dtype
from .ort.cache_pool import BlockHandle, BoundPass, CachePool
from .ort.device import Device, dtype_of
from .sampling_head import SamplingHead

MAX_BOUND_NODES = 64  # of a row, in passes whose shapes come again


class DeviceCache(CacheColumns):
    """Keys and values on a device, in memory of their own."""

    def __init__(self, pool: CachePool, rows: int, capacity: int, columns: int | None = None) -> None:
        super().__init__(np.zeros(rows, np.int64), capacity, columns)
        self.pool, self.lease = pool, pool.take(rows, self.columns)
        self.bound: BoundPass | None = None  # the last pass

    def finish(self) -> None:
        """Run the last pass, if nobody has asked for what comes of it."""
        if self.bound is not None:
            self.bound.finish()

    def append(self, new_kv: Ints, accepted_indices: list[Ints]) -> None:
        """As `CacheColumns.accept`; what has to move does so on the device, in every head."""
        moves = self.accept(new_kv, accepted_indices)
        if len(moves):
            self.finish()
            block = self.lease.block
            self.pool.move(block, moves[:, [0, 1]], moves[:, [0, 2]], np.arange(0, block.shape[1], self.columns))

    def keep_rows(self, rows: Ints) -> None:
        """Keep only these rows, in this order; copied on the device."""
        self.finish()
        before = self.lease  # held until it has been read
        self.select(rows)
        self.lease = self.pool.take(len(rows), self.columns)
        self.pool.copy(before.block, rows, self.lease.block)

    def extend(self, other: Cache) -> None:
        """Take in the rows of another cache; copied on the device."""
        added, before = type(self).require(other), self.lease  # held until it has been read
        self.finish()
        added.finish()
        self.join(added)
        own, more = before.block.shape[0], added.lease.block.shape[0]
        self.lease = self.pool.take(own + more, self.columns)
        self.pool.copy(before.block, np.arange(own), self.lease.block)
        self.pool.copy(added.lease.block, np.arange(more), self.lease.block, own)


class DeviceRows:
    """Output `name` of a pass, `[rows, nodes, width]`. Indexing the first two axes copies just those rows, as float32.

    lease: held, so that no other cache runs the pass again; without, nobody does.
    """

    def __init__(self, bound: BoundPass, name: str, lease: BlockHandle | None = None) -> None:
        self.bound, self.lease, self._value = bound, lease, bound.outputs[name]
        self.dtype, self.stride = dtype_of(self._value), self._value.shape()[1]
        bound.users.add(self)

    @property
    def value(self) -> Any:
        """The rows as a value on the device, when they are there."""
        self.bound.finish()
        return self._value

    def __getitem__(self, key: Any) -> Floats:
        rows, nodes, _ = self._value.shape()
        places: Ints = np.arange(rows * nodes).reshape(rows, nodes)[key]
        return self.bound.device.read(self.value, places)


class LogitRows(DeviceRows, DeviceLogits):
    """Logits of a pass, with codes drawn on the device."""

    def draws(self, sampling: Sampling) -> bool:
        """Whether there is a graph for these settings."""
        return SamplingHead.supports(sampling)

    def best(self, requests: Sequence[SampleRequest], most: int) -> list[tuple[Ints, Floats]]:
        """As the runtime's `best_codes` on the host, up to rounding; those with the same filters are drawn at once."""
        vocab_size = self._value.shape()[2]
        heads = [SamplingHead.from_sampling(one.sampling, vocab_size, most, one.noise is not None) for one in requests]
        results: dict[int, tuple[Ints, Floats]] = {}
        for head in dict.fromkeys(heads):
            own = [i for i, other in enumerate(heads) if other == head]
            codes, scores = self.bound.draw(head, [requests[i] for i in own])
            for place, i in enumerate(own):
                count = len(requests[i].positions)
                results[i] = codes[place, :count], scores[place, :count]
        return [results[i] for i in range(len(requests))]


class DeviceEngine(ABC):
    """A decoder in the device layout. With a table of code embeddings it is a target; without, a drafter."""

    def __init__(
        self,
        graph: Executable,
        inputs: Sequence[Tensor],
        spec: DecoderSpec | DrafterSpec,
        code_embeddings: Floats | None,
        device: Device,
        dtype: str,
        heads: int | None,
    ) -> None:
        """dtype: of caches, and as `rows_dtype` of hidden states. heads: as for `CachePool`."""
        self.spec, self.device, self._graph, self._dtype = spec, device, graph, rows_dtype(dtype)
        table = None if code_embeddings is None else np.ascontiguousarray(code_embeddings, self._dtype)
        self._table = None if table is None else device.put(table)
        self._past = [tensor.name for tensor in inputs if tensor.name.startswith("past_")]
        width = spec.head_dim * (1 if heads else spec.num_kv_heads)
        self._pool = CachePool(device, len(self._past), STORAGE_DTYPES.get(dtype, dtype), width, heads)

    @abstractmethod
    def new_cache(self, rows: int, capacity: int) -> DeviceCache:
        """An empty cache in the device's memory, all of it taken at once."""

    @abstractmethod
    def fit(self, cache: DeviceCache, nodes: int) -> int:
        """How many nodes a pass over so many is filled up to. Raises: EngineError if there are too many."""

    def next_past_length(self, cache: Cache, nodes: int) -> int:
        """The longest row, rounded up. Raises: EngineError: as `fit`."""
        own = DeviceCache.require(cache)
        self.fit(own, nodes)
        return own.past_length()

    def run(self, batch: Pass, cache: Cache) -> PassOutput:
        """Prepare one pass, to be run when its logits or hidden states, rows on the device, or its cache are used."""
        own = DeviceCache.require(cache)
        own.finish()
        checked_past_length(batch, own)
        padded = self.fit(own, batch.positions.shape[1])
        feeds = {**own.encode(batch, padded), **self._read(batch, padded)}
        own.bound, lease = self._bound(own, batch, feeds)
        own.bound.begin(feeds, batch.hidden)
        own.passes += 1
        return PassOutput(
            LogitRows(own.bound, "logits", lease), DeviceRows(own.bound, "hidden_states", lease), own.written
        )

    def _read(self, batch: Pass, nodes: int) -> dict[str, Any]:
        """What nodes read, as the graph takes it, filled up to so many of a row; what is on the device stays there."""
        if self._table is not None:
            if (batch.tokens is None) == (batch.embeds is None):
                raise ValueError("a target reads either `tokens` or `embeds`")
            if batch.tokens is not None:
                return {"embeddings": self._table, "token_ids": pad_nodes(batch.tokens, nodes, np.int32)}
            prefix, ids = _enumerate(batch.embeds, self._dtype)  # a table of its own
            return {"embeddings": prefix.reshape(ids.size, -1), "token_ids": pad_nodes(ids, nodes, np.int32)}
        if batch.tokens is None or batch.hidden is None:
            raise ValueError("a drafter reads `tokens` and `hidden`")
        states = batch.hidden
        source = states.source if isinstance(states, HiddenView) else None
        here = isinstance(source, DeviceRows) and source.bound.device is self.device and source.dtype == self._dtype
        if isinstance(states, HiddenView) and isinstance(source, DeviceRows) and here:
            hidden, ids = source.value, states.rows * source.stride + states.nodes
        else:
            hidden, ids = _enumerate(states.read() if isinstance(states, HiddenView) else states, self._dtype)
        tokens = pad_nodes(batch.tokens, nodes, np.int32)
        return {"token_ids": tokens, "hidden": hidden, "hidden_ids": pad_nodes(ids, nodes, np.int32)}

    def _bound(self, cache: DeviceCache, batch: Pass, feeds: Mapping[str, Any]) -> tuple[BoundPass, BlockHandle | None]:
        """A pass of this shape on the cache's memory, and the lease of it; a passing one where it will hardly recur."""
        rows, nodes, words = feeds["seen"].shape
        hidden, block = batch.hidden, cache.lease.block

        def make(lasting: bool = True) -> BoundPass:
            placed = dict(zip(self._past, self._pool.tensors(block), strict=True))
            placed |= {name.replace("past", "present", 1): one for name, one in placed.items()}  # written in place
            placed["logits"] = self.device.empty((rows, nodes, self.spec.vocab_size), "float32")
            placed["hidden_states"] = self.device.empty((rows, nodes, self.spec.hidden_size), self._dtype)
            return BoundPass(self._graph, self.device, feeds, placed, lasting)

        lasting = hidden is None or (
            isinstance(hidden, HiddenView) and getattr(hidden.source, "lease", None) is not None
        )
        if nodes > MAX_BOUND_NODES or batch.embeds is not None or not lasting:
            return make(lasting=False), None
        shape = nodes, words, id(feeds.get("hidden"))
        return self._pool.bound(block, shape, make), cache.lease


def _enumerate(states: Floats | None, dtype: str) -> tuple[Array, Ints]:
    """States `[rows, nodes, width]`, and where each is, its rows one after the other, `[rows, nodes]`."""
    rows = np.ascontiguousarray(states, dtype)
    return rows, np.arange(rows.shape[0] * rows.shape[1]).reshape(rows.shape[:2])
