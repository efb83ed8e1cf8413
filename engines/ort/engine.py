"""Decoder graphs in ONNX Runtime: the target and the drafter as engines of the decode loop.

Keys and values are NumPy buffers, read in place. One engine may serve several threads, each with caches of its own.

Does not know trees, prompts or acceptance.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from ...bundle.manifest import DecoderSpec, DrafterSpec
from ...runtime.engine import Cache, Floats, Pass, PassOutput
from ..decoder_tensors import NodeInputs, check_span, decoder_tensors, kv_dtype
from ..kv_cache import KVCache
from .session import GraphSession, ThreadOptions


class OrtEngine:
    """A decoder graph. With a table of code embeddings it is a target; without, a drafter."""

    def __init__(
        self,
        path: Path,
        spec: DecoderSpec | DrafterSpec,
        code_embeddings: Floats | None = None,
        threads: ThreadOptions | None = None,
        provider: str = "cpu",
        optimised: bool = False,
    ) -> None:
        self.spec = spec
        inputs, outputs = decoder_tensors(spec, drafts=code_embeddings is None)
        self._graph = GraphSession(path, inputs, outputs, threads, provider, optimised)
        self._past = [tensor.name for tensor in inputs if tensor.name.startswith("past_key_values.")]
        self._kv_dtype = kv_dtype(path, self._graph.dtypes)
        self.node_inputs = NodeInputs(code_embeddings, self._graph.dtypes)

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache for `rows` sequences of at most `capacity` entries each."""
        spec = self.spec
        return KVCache.empty(rows, capacity, spec.num_layers, spec.num_kv_heads, spec.head_dim, self._kv_dtype)

    def next_past_length(self, cache: Cache, nodes: int) -> int:
        """The longest row, rounded up so that sums are formed in one order whatever else is in the batch."""
        return _own(cache).past_length()

    def run(self, batch: Pass, cache: Cache) -> PassOutput:
        """Run one pass. Counts itself in `cache.passes` and `cache.seconds`."""
        own = _own(cache)
        feeds = self.node_inputs(batch)
        feeds.update(zip(self._past, own.past(check_span(batch, own)), strict=True))
        start = time.perf_counter()
        logits, features, *new_kv = self._graph.run(feeds)
        own.seconds += time.perf_counter() - start
        own.passes += 1
        return PassOutput(logits.astype(np.float32, copy=False), features.astype(np.float32, copy=False), new_kv)


def _own(cache: Cache) -> KVCache:
    if not isinstance(cache, KVCache):
        raise TypeError(f"a cache of another engine: {type(cache).__name__}")
    return cache
