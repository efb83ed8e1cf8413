"""The tensors of target and drafter graphs: what they are called and shaped, and how a pass fills them.

The same for every backend. Does not know any backend's library, nor trees or prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..bundle.manifest import DecoderSpec, DrafterSpec
from ..errors import BundleError
from ..runtime.engine import Floats, Pass
from .kv_cache import KVCache, round_up
from .ort.session import Array, Tensor

_FLOATS = ("float32", "float16")
# Added to the scores of hidden columns: finite, so that softmax never meets inf - inf; large enough to
# swallow any score, so that a hidden column weighs nothing.
_HIDDEN = {np.float32: -1e30, np.float16: -6e4}


def decoder_tensors(spec: DecoderSpec | DrafterSpec, drafts: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and outputs of a target or drafter graph; keys and values come last, layer by layer."""
    numbers: tuple[str, ...] = (spec.dtype,) if isinstance(spec, DecoderSpec) else _FLOATS
    rows: list[Tensor] = [Tensor("input_embeds", _FLOATS, (None, None, spec.hidden_size))]
    if drafts:
        rows = [
            Tensor("input_ids", ("int64",), (None, None)),
            Tensor("target_hidden", _FLOATS, (None, None, spec.hidden_size)),
        ]
    entry = (None, None, spec.num_kv_heads, spec.head_dim)
    names = [f"key_values.{i}.{part}" for i in range(spec.num_layers) for part in ("key", "value")]
    inputs = [
        *rows,
        Tensor("position_ids", ("int64",), (None, None)),
        Tensor("attention_mask", _FLOATS, (None, 1, None, None)),
        *(Tensor(f"past_{name}", numbers, entry) for name in names),
    ]
    outputs = [
        Tensor("logits", _FLOATS, (None, None, spec.vocab_size)),
        Tensor("hidden_states", _FLOATS, (None, None, spec.hidden_size)),
        *(Tensor(f"new_{name}", numbers, entry) for name in names),
    ]
    return inputs, outputs


def kv_dtype(where: object, dtypes: Mapping[str, type[np.generic]]) -> type[np.floating[Any]]:
    """The one type of all keys and values; BundleError if there are two."""
    kinds = {dtype for name, dtype in dtypes.items() if "key_values." in name}
    if len(kinds) > 1:
        raise BundleError(
            f"{where}: found keys and values of both float16 and float32, expected one type; export again"
        )
    return np.float16 if np.float16 in kinds else np.float32


def check_span(batch: Pass, cache: KVCache) -> int:
    """Columns of the past that a pass reads; ValueError if the caller did not ask `next_past_length`."""
    past_length: int = batch.attention_mask.shape[2] - batch.positions.shape[1]
    if not cache.past_length() <= past_length <= round_up(max(1, cache.capacity)):
        raise ValueError(
            f"a pass over {past_length} past columns, expected {cache.past_length()}, as `next_past_length` says"
        )
    return past_length


class NodeInputs:
    """A graph's inputs but for the past: what is read for each node, where it is, whom it sees.

    table: embeddings of codes, for targets; drafters read tokens and hidden states.
    """

    def __init__(self, table: Floats | None, dtypes: Mapping[str, type[np.generic]]) -> None:
        self._table = table
        self._mask_dtype = dtypes["attention_mask"]
        self._row_dtype = dtypes["target_hidden" if table is None else "input_embeds"]

    def __call__(self, batch: Pass) -> dict[str, Array]:
        """Contiguous arrays by name."""
        inputs = self._rows(batch)
        inputs["position_ids"] = np.ascontiguousarray(batch.positions, np.int64)
        hidden = self._mask_dtype(_HIDDEN[self._mask_dtype])
        inputs["attention_mask"] = np.where(batch.attention_mask, self._mask_dtype(0), hidden)[:, None]
        return inputs

    def _rows(self, batch: Pass) -> dict[str, Array]:
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
