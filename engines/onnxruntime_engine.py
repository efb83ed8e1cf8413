"""Decoder graphs in ONNX Runtime: the target and the drafter as engines of the decode loop.

Translates between the runtime's passes (tokens, visibility, spans) and the graph's tensors (embeddings,
additive masks, past keys and values). One engine may serve several threads, each with caches of its own.

Does not know trees, prompts or acceptance.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from ..errors import BundleError
from ..manifest import DecoderSpec, DrafterSpec
from ..runtime.engine import Cache, Floats, Pass, PassOutput
from .kv_cache import KVCache, round_up
from .onnxruntime_session import Array, GraphSession, Tensor, ThreadOptions

_FLOATS = ("float32", "float16")
# Added to the scores of hidden columns: finite, so that softmax never meets inf - inf; large enough to
# swallow any score, so that a hidden column weighs nothing.
_HIDDEN = {np.float32: -1e30, np.float16: -6e4}


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
        self._table = code_embeddings
        inputs, outputs = decoder_tensors(spec, drafts=code_embeddings is None)
        self._graph = GraphSession(path, inputs, outputs, threads, provider, optimised)
        self._past = [tensor.name for tensor in inputs if tensor.name.startswith("past_key_values.")]
        dtypes = self._graph.dtypes
        kinds = {dtypes[tensor.name] for tensor in [*inputs, *outputs] if "key_values." in tensor.name}
        if len(kinds) > 1:
            raise BundleError(
                f"{path}: found keys and values of both float16 and float32, expected one type; export again"
            )
        self._kv_dtype: type[np.floating] = np.float16 if np.float16 in kinds else np.float32
        self._mask_dtype = dtypes["attention_mask"]
        self._row_dtype = dtypes["target_hidden" if code_embeddings is None else "input_embeds"]

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache for `rows` sequences of at most `capacity` entries each."""
        spec = self.spec
        return KVCache.empty(rows, capacity, spec.layers, spec.kv_heads, spec.head_width, self._kv_dtype)

    def next_span(self, cache: Cache, nodes: int) -> int:
        """The longest row, rounded up so that sums are formed in one order whatever else is in the batch."""
        return _own(cache).span()

    def run(self, batch: Pass, cache: Cache) -> PassOutput:
        """Run one pass. Counts itself in `cache.passes` and `cache.seconds`."""
        own = _own(cache)
        feeds = self.node_inputs(batch)
        feeds.update(zip(self._past, own.past(self.check_span(batch, own)), strict=True))
        start = time.perf_counter()
        logits, features, *fresh = self._graph.run(feeds)
        own.seconds += time.perf_counter() - start
        own.passes += 1
        return PassOutput(logits.astype(np.float32, copy=False), features.astype(np.float32, copy=False), fresh)

    def check_span(self, batch: Pass, cache: KVCache) -> int:
        """Columns of the past that a pass reads; ValueError if the caller did not ask `next_span`."""
        span: int = batch.visible.shape[2] - batch.positions.shape[1]
        if not cache.span() <= span <= round_up(max(1, cache.capacity)):
            raise ValueError(f"a pass over {span} past columns, expected {cache.span()}: `next_span` says how many")
        return span

    def node_inputs(self, batch: Pass) -> dict[str, Array]:
        """The graph's inputs but for the past: what is read for each node, where it is, whom it sees."""
        inputs = self._rows(batch)
        inputs["position_ids"] = np.ascontiguousarray(batch.positions, np.int64)
        hidden = self._mask_dtype(_HIDDEN[self._mask_dtype])
        inputs["attention_mask"] = np.where(batch.visible, self._mask_dtype(0), hidden)[:, None]
        return inputs

    def _rows(self, batch: Pass) -> dict[str, Array]:
        """What the graph reads for each node: embeddings, or tokens and hidden states."""
        if self._table is None:
            if batch.tokens is None or batch.hidden is None:
                raise ValueError("a drafter reads `tokens` and `hidden`")
            return {
                "input_ids": np.ascontiguousarray(batch.tokens, np.int64),
                "target_hidden": np.ascontiguousarray(batch.hidden, self._row_dtype),
            }
        if (batch.tokens is None) == (batch.embeds is None):
            raise ValueError("a target reads either `tokens` or `embeds`")
        embeds = np.take(self._table, batch.tokens, axis=0) if batch.tokens is not None else batch.embeds
        return {"input_embeds": np.ascontiguousarray(embeds, self._row_dtype)}


def decoder_tensors(spec: DecoderSpec | DrafterSpec, drafts: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and outputs of a target or drafter graph."""
    numbers: tuple[str, ...] = (spec.dtype,) if isinstance(spec, DecoderSpec) else _FLOATS
    rows: list[Tensor] = [Tensor("input_embeds", _FLOATS, (None, None, spec.width))]
    if drafts:
        rows = [
            Tensor("input_ids", ("int64",), (None, None)),
            Tensor("target_hidden", _FLOATS, (None, None, spec.width)),
        ]
    entry = (None, None, spec.kv_heads, spec.head_width)
    names = [f"key_values.{i}.{part}" for i in range(spec.layers) for part in ("key", "value")]
    inputs = [
        *rows,
        Tensor("position_ids", ("int64",), (None, None)),
        Tensor("attention_mask", _FLOATS, (None, 1, None, None)),
        *(Tensor(f"past_{name}", numbers, entry) for name in names),
    ]
    outputs = [
        Tensor("logits", _FLOATS, (None, None, spec.vocabulary)),
        Tensor("hidden_states", _FLOATS, (None, None, spec.width)),
        *(Tensor(f"new_{name}", numbers, entry) for name in names),
    ]
    return inputs, outputs


def _own(cache: Cache) -> KVCache:
    if not isinstance(cache, KVCache):
        raise TypeError(f"a cache of another engine: {type(cache).__name__}")
    return cache
