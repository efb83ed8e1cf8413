"""Tensors of target and drafter graphs: names, types and shapes, and their values for a forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..bundle.manifest import DecoderSpec, DrafterSpec
from ..errors import BundleError
from ..runtime.engine import Floats, HiddenView, PassInput
from .contracts import Array, DTypes, Tensor
from .graph_writer import column_shape
from .kv_cache import CacheRows

_FLOATS = ("float32", "float16")
# Added to scores of masked columns: finite, so that softmax never meets inf - inf; large enough to swallow any score.
_MASKED = {np.float32: -1e30, np.float16: -6e4}


def decoder_tensors(spec: DecoderSpec | DrafterSpec, is_drafter: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs and outputs of a bundle's graph; keys and values come last, by layer.

    Args:
        spec: sizes of the decoder.
        is_drafter: whether the graph is the drafter, not the target.
    """
    kv_dtypes: tuple[str, ...] = (rows_dtype(spec.dtype),) if isinstance(spec, DecoderSpec) else _FLOATS
    entry = (None, None, spec.num_kv_heads, spec.head_dim)
    inputs = [
        *([Tensor("input_ids", ("int64",), (None, None))] if is_drafter else []),
        Tensor("target_hidden" if is_drafter else "input_embeds", _FLOATS, (None, None, spec.hidden_size)),
        Tensor("position_ids", ("int64",), (None, None)),
        Tensor("attention_mask", _FLOATS, (None, 1, None, None)),
        *_keys_and_values("past", spec, kv_dtypes, entry),
    ]
    states = Tensor("hidden_states", _FLOATS, (None, None, spec.hidden_size))
    logits = Tensor("logits", _FLOATS, (None, None, spec.vocab_size))
    return inputs, [logits, states, *_keys_and_values("new", spec, kv_dtypes, entry)]


def device_tensors(
    spec: DecoderSpec | DrafterSpec, is_drafter: bool, dtypes: tuple[str, ...], capacity: int | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs and outputs of a `make_device_graph`.

    Args:
        spec: sizes of the decoder.
        is_drafter: whether the decoder is the drafter, not the target.
        dtypes: allowed types of caches, and, after `rows_dtype`, of hidden states.
        capacity: columns of a cache in order; None: columns in any order.
    """
    rows = tuple(map(rows_dtype, dtypes))
    states = Tensor("hidden_states", rows, (None, None, spec.hidden_size))
    cache: tuple[int | None, ...] = (None, None, *column_shape(spec.num_kv_heads * spec.head_dim))
    write: tuple[int | None, ...] = (None, None, 1, 3)
    if capacity is not None:
        cache = (None, spec.num_kv_heads, capacity, spec.head_dim)
        write = (None,)
    inputs = [
        Tensor("hidden", rows, states.shape) if is_drafter else Tensor("embeddings", rows, (None, spec.hidden_size)),
        Tensor("token_ids", ("int32",), (None, None)),
        *([Tensor("hidden_ids", ("int32",), (None, None))] if is_drafter else []),
        Tensor("position_ids", ("int64",), (None, None)),
        Tensor("write", ("int64",), write),
        Tensor("seen", ("int32",), (None, None, None)),
        *_keys_and_values("past", spec, dtypes, cache),
    ]
    logits = Tensor("logits", ("float32",), (None, None, spec.vocab_size))
    return inputs, [logits, states, *_keys_and_values("present", spec, dtypes, cache)]


def rows_dtype(dtype: str) -> str:
    """Return the type of hidden states and embeddings of a decoder that computes in `dtype`; NumPy has no bfloat16."""
    return "float32" if dtype == "bfloat16" else dtype


def _keys_and_values(
    name_prefix: str, spec: DecoderSpec | DrafterSpec, dtypes: tuple[str, ...], shape: tuple[int | None, ...]
) -> list[Tensor]:
    parts = ((i, part) for i in range(spec.num_layers) for part in ("key", "value"))
    return [Tensor(f"{name_prefix}_key_values.{i}.{part}", dtypes, shape) for i, part in parts]


def kv_dtype(source: object, dtypes: DTypes) -> type[np.floating[Any]]:
    """Return the type of all keys and values. Raises: BundleError: they have two types."""
    kinds = {dtype for name, dtype in dtypes.items() if "key_values." in name}
    if len(kinds) > 1:
        both = "keys and values of both float16 and float32"
        raise BundleError(field=str(source), found=both, expected="one type", remedy="export the bundle again")
    return np.float16 if np.float16 in kinds else np.float32


def check_past_length(batch: PassInput, cache: CacheRows) -> int:
    """Return the number of past columns of a pass. Raises: ValueError: it is not that of `next_past_length`."""
    past: int = batch.attention_mask.shape[2] - batch.positions.shape[1]
    expected = cache.past_length()
    if not expected <= past <= cache.columns:
        raise ValueError(f"a pass over {past} past columns, expected {expected}, as `next_past_length` says")
    return past


def build_node_inputs(batch: PassInput, table: Floats | None, dtypes: DTypes) -> dict[str, Array]:
    """Return a graph's inputs without the past, contiguous: tokens or embeddings, positions and attention mask.

    Args:
        table: embeddings of tokens, for targets; None: a drafter, which reads tokens and hidden states.
        dtypes: types of the inputs by name.
    """
    if table is None:
        if batch.tokens is None or batch.hidden is None:
            raise ValueError("a drafter reads `tokens` and `hidden`")
        states = batch.hidden.read() if isinstance(batch.hidden, HiddenView) else batch.hidden
        hidden = np.ascontiguousarray(states, dtypes["target_hidden"])
        rows = {"input_ids": np.ascontiguousarray(batch.tokens, np.int64), "target_hidden": hidden}
    else:
        if (batch.tokens is None) == (batch.embeds is None):
            raise ValueError("a target reads either `tokens` or `embeds`")
        embeds = batch.embeds if batch.tokens is None else np.take(table, batch.tokens, axis=0)
        rows = {"input_embeds": np.ascontiguousarray(embeds, dtypes["input_embeds"])}
    mask_dtype = dtypes["attention_mask"]
    return rows | {
        "position_ids": np.ascontiguousarray(batch.positions, np.int64),
        "attention_mask": np.where(batch.attention_mask, mask_dtype(0), mask_dtype(_MASKED[mask_dtype]))[:, None],
    }
