"""Decoder engines whose keys, values, logits and hidden states stay in the memory of a GPU or other device.

Token ids, positions, masks and noise are uploaded, and sampled tokens are copied to the host. ONNX Runtime or TensorRT
runs the decoder. ONNX Runtime allocates the device memory and does all other work on the device (`ort/device.py`).
Several threads may use an engine if each thread has separate caches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from ..bundle.manifest import DecoderSizes
from ..methods import Sampling
from ..runtime.device import DeviceLogits, SamplingRequest
from ..runtime.engine import (
    Cache,
    DeviceArray,
    Floats,
    HiddenStateView,
    Ints,
    PassInput,
    PassOutput,
    read_hidden_states,
)
from .columns import CacheColumnMap, pad_nodes
from .contracts import STORAGE_DTYPES, Array, ExecutableGraph, TensorSpec
from .decoder_tensors import check_pass_input, get_hidden_dtype
from .ort.cache_pool import BlockHandle, BoundForwardPass, CachePool
from .ort.device import OrtDevice, get_value_dtype
from .sampling_head import SamplingHead

# Passes with more nodes per row are bound for a single run, as their shapes hardly recur.
MAX_BOUND_NODES = 64


class DeviceCache(CacheColumnMap):
    """KV cache of an engine in device memory, which a block of a `CachePool` provides."""

    def __init__(self, pool: CachePool, num_rows: int, capacity: int, num_columns: int | None = None) -> None:
        super().__init__(np.zeros(num_rows, np.int64), capacity, num_columns)
        self.pool = pool
        self.block_handle = pool.acquire_block(num_rows, self.num_columns)
        self.bound_pass: BoundForwardPass | None = None  # the last pass on this cache

    def run_queued_pass(self) -> None:
        """Run the last pass on this cache, if it has not run yet."""
        if self.bound_pass is not None:
            self.bound_pass.run_queued_pass()

    def append(self, new_kv: Ints, accepted_indices: list[Ints]) -> None:
        moves = self.accept_nodes(new_kv, accepted_indices)
        if len(moves):
            self.run_queued_pass()
            block = self.block_handle.block
            # Each head has `num_columns` columns of the block, so the moves are repeated for every head.
            self.pool.move_entries(
                block, moves[:, [0, 1]], moves[:, [0, 2]], np.arange(0, block.shape[1], self.num_columns)
            )

    def keep_rows(self, rows: Ints) -> None:
        self.run_queued_pass()
        previous = self.block_handle  # not released before it has been copied
        self.select_rows(rows)
        self.block_handle = self.pool.acquire_block(len(rows), self.num_columns)
        self.pool.gather_rows([(previous.block, rows)], self.block_handle.block)

    def extend(self, cache: Cache) -> None:
        added = type(self).require_instance(cache)
        previous = self.block_handle  # not released before it has been copied
        self.run_queued_pass()
        added.run_queued_pass()
        self.append_rows(added)
        num_rows = previous.block.shape[0]
        num_added = added.block_handle.block.shape[0]
        self.block_handle = self.pool.acquire_block(num_rows + num_added, self.num_columns)
        sources = [(previous.block, np.arange(num_rows)), (added.block_handle.block, np.arange(num_added))]
        self.pool.gather_rows(sources, self.block_handle.block)

    def forbid_memory_reuse(self) -> None:
        """Keep the block of this cache from later caches, as it may contain NaN, which masks do not hide."""
        self.block_handle.block.is_reusable = False


class DeviceOutputTensor:
    """Output of a pass on the device, `[rows, nodes, width]`.

    Indexing the first two axes copies vectors to the host, as float32. `block_handle` prevents another cache from
    running the bound pass, which would overwrite the output; it is None if the pass is bound for a single run.
    """

    def __init__(self, bound_pass: BoundForwardPass, name: str, block_handle: BlockHandle | None = None) -> None:
        self.bound_pass = bound_pass
        self.block_handle = block_handle
        self._value = bound_pass.outputs[name]
        self.dtype = get_value_dtype(self._value)
        self.stride = self._value.shape()[1]  # number of nodes per row, with padding
        bound_pass.output_owners.add(self)

    @property
    def device_value(self) -> Any:
        """OrtValue of the output. The pass is run first if it is still queued."""
        self.bound_pass.run_queued_pass()
        return self._value

    def __getitem__(self, key: Any) -> Floats:
        rows, nodes, _ = self._value.shape()
        # NumPy applies `key` to an array of the indices of all vectors, [rows, nodes].
        indices: Ints = np.arange(rows * nodes).reshape(rows, nodes)[key]
        return self.bound_pass.device.read_vectors(self.device_value, indices)


class DeviceLogitsTensor(DeviceOutputTensor, DeviceLogits):
    """Logits of a pass, from which tokens are sampled on the device."""

    def supports_sampling(self, sampling: Sampling) -> bool:
        return SamplingHead.supports(sampling)

    def sample_top_codes(self, samples: Sequence[SamplingRequest], count: int) -> list[tuple[Ints, Floats]]:
        """Return what `find_top_codes` computes on the host, except for rounding."""
        vocab_size = self._value.shape()[2]
        heads = [
            SamplingHead.from_sampling(sample.sampling, vocab_size, count, sample.noise is not None)
            for sample in samples
        ]
        results: dict[int, tuple[Ints, Floats]] = {}
        for head in dict.fromkeys(heads):  # requests with equal heads are sampled by one run of a graph
            indices = [i for i, requested in enumerate(heads) if requested == head]
            codes, scores = self.bound_pass.sample(head, [samples[i] for i in indices])
            for row, i in enumerate(indices):
                nodes = len(samples[i].positions)
                results[i] = (codes[row, :nodes], scores[row, :nodes])
        return [results[i] for i in range(len(samples))]


class DeviceEngine(ABC):
    """Base class of engines that run a decoder in the device layout (`device_graph.py`).

    Args:
        graphs: the decoder, and the graph that runs passes over prefixes if it is another one.
        code_embeddings: embeddings of tokens, `[vocab_size, hidden_size]`, for a target; None: a drafter.
        dtype: type of caches; hidden states have the type `get_hidden_dtype(dtype)`.
        num_cache_heads: number of heads, if a cache stores each head separately; None: all heads are in one column.
    """

    def __init__(
        self,
        graphs: Sequence[ExecutableGraph],
        inputs: Sequence[TensorSpec],
        spec: DecoderSizes,
        code_embeddings: Floats | None,
        device: OrtDevice,
        dtype: str,
        num_cache_heads: int | None,
    ) -> None:
        self.spec = spec
        self.device = device
        self._graph = graphs[0]
        self._prefix_graph = graphs[-1]
        self._dtype = get_hidden_dtype(dtype)
        table = None if code_embeddings is None else np.ascontiguousarray(code_embeddings, self._dtype)
        self._embedding_table = None if table is None else device.upload(table)
        self._past = [tensor.name for tensor in inputs if tensor.name.startswith("past_")]
        width = spec.head_dim * (1 if num_cache_heads else spec.num_kv_heads)  # width of a column
        self._pool = CachePool(device, len(self._past), STORAGE_DTYPES.get(dtype, dtype), width, num_cache_heads)

    @abstractmethod
    def make_cache(self, rows: int, capacity: int) -> DeviceCache:
        """Create an empty cache whose memory on the device is allocated for `capacity` entries per row."""

    @abstractmethod
    def compute_padded_node_count(self, cache: DeviceCache, num_nodes: int) -> int:
        """Return the number of nodes of a pass with padding, or raise EngineError if the engine does not support it."""

    def past_columns(self, cache: Cache, nodes: int) -> int:
        device_cache = DeviceCache.require_instance(cache)
        self.compute_padded_node_count(device_cache, nodes)  # raises early if the pass is too large
        return device_cache.past_length()

    def run(self, batch: PassInput, cache: Cache) -> PassOutput:
        """Queue a pass, which runs when its logits, hidden states or cache are first used.

        If tokens are sampled first, the pass and the sampling need only one upload.
        """
        device_cache = DeviceCache.require_instance(cache)
        device_cache.run_queued_pass()  # the previous pass: its inputs are replaced below
        check_pass_input(batch, device_cache, self.spec)
        padded = self.compute_padded_node_count(device_cache, batch.positions.shape[1])
        feeds = {**device_cache.encode_pass_inputs(batch, padded), **self._build_token_inputs(batch, padded)}
        bound_pass, block_handle = self._bind_pass(device_cache, batch, feeds)
        device_cache.bound_pass = bound_pass
        bound_pass.queue_inputs(feeds, batch.hidden)
        device_cache.num_passes += 1
        return PassOutput(
            DeviceLogitsTensor(bound_pass, "logits", block_handle),
            DeviceOutputTensor(bound_pass, "hidden_states", block_handle),
            device_cache.written_columns,
        )

    def _build_token_inputs(self, batch: PassInput, num_nodes: int) -> dict[str, Any]:
        if self._embedding_table is not None:
            if batch.tokens is not None:
                return {"embeddings": self._embedding_table, "token_ids": pad_nodes(batch.tokens, num_nodes, np.int32)}
            # A prefix has embeddings instead of tokens. They replace the table, and each node looks up one of them.
            prefix, ids = _flatten_hidden_states(batch.embeds, self._dtype)
            return {"embeddings": prefix.reshape(ids.size, -1), "token_ids": pad_nodes(ids, num_nodes, np.int32)}
        states = batch.hidden
        assert batch.tokens is not None
        assert states is not None
        if isinstance(states, HiddenStateView) and self._has_on_device(source := states.source):
            hidden: Any = source.device_value
            ids = states.rows * source.stride + states.nodes
        else:
            hidden, ids = _flatten_hidden_states(read_hidden_states(states), self._dtype)
        tokens = pad_nodes(batch.tokens, num_nodes, np.int32)
        return {"token_ids": tokens, "hidden": hidden, "hidden_ids": pad_nodes(ids, num_nodes, np.int32)}

    def _has_on_device(self, states: DeviceArray) -> TypeGuard[DeviceOutputTensor]:
        return (
            isinstance(states, DeviceOutputTensor)
            and states.bound_pass.device is self.device
            and states.dtype == self._dtype
        )

    def _bind_pass(
        self, cache: DeviceCache, batch: PassInput, feeds: Mapping[str, Any]
    ) -> tuple[BoundForwardPass, BlockHandle | None]:
        """Return a pass that is bound to a cache, and the handle of the cache's block; None for a single run."""
        rows, nodes, words = feeds["seen"].shape
        hidden = batch.hidden
        block = cache.block_handle.block

        def make_bound_pass(is_recurring: bool = True) -> BoundForwardPass:
            """Bind a new pass to the tensors of the block; only a recurring pass may be recorded."""
            placed = dict(zip(self._past, self._pool.get_block_tensors(block), strict=True))
            placed |= {name.replace("past", "present", 1): value for name, value in placed.items()}  # written in place
            placed["logits"] = self.device.empty((rows, nodes, self.spec.vocab_size), "float32")
            placed["hidden_states"] = self.device.empty((rows, nodes, self.spec.hidden_size), self._dtype)
            graph = self._graph if batch.embeds is None else self._prefix_graph
            return BoundForwardPass(graph, self.device, feeds, placed, is_recurring)

        # Hidden states from a pass that recurs stay at one address. Others have a new address in every pass.
        is_recurring = hidden is None or (
            isinstance(hidden, HiddenStateView) and getattr(hidden.source, "block_handle", None) is not None
        )
        if nodes > MAX_BOUND_NODES or batch.embeds is not None or not is_recurring:
            return make_bound_pass(is_recurring=False), None
        shape = (nodes, words, id(feeds.get("hidden")))
        return self._pool.get_bound_pass(block, shape, make_bound_pass), cache.block_handle


def _flatten_hidden_states(states: Floats | None, dtype: str) -> tuple[Array, Ints]:
    """Return states as a contiguous array, and the index of each in the flattened first two axes."""
    rows = np.ascontiguousarray(states, dtype)
    return rows, np.arange(rows.shape[0] * rows.shape[1]).reshape(rows.shape[:2])
