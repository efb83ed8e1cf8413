"""Tensors of target and drafter graphs: names, types and shapes, and their values for a forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..bundle.manifest import DecoderSpec, DrafterSpec
from ..errors import BundleError
from ..runtime.engine import Floats, HiddenStateView, PassInput
from .contracts import Array, DTypes, TensorSpec
from .graph_writer import choose_column_parts
from .kv_cache import BaseKVCache

_FLOATS = ("float32", "float16")
# Added to scores of masked columns: finite, so that softmax never meets inf - inf; large enough to swallow any score.
_MASKED = {np.float32: -1e30, np.float16: -6e4}


def decoder_tensors(spec: DecoderSpec | DrafterSpec, is_drafter: bool) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Return the inputs and outputs of a bundle's graph; keys and values come last, by layer.

    Args:
        spec: sizes of the decoder.
        is_drafter: whether the graph is the drafter, not the target.
    """
    kv_dtypes: tuple[str, ...] = (get_hidden_dtype(spec.dtype),) if isinstance(spec, DecoderSpec) else _FLOATS
    entry = (None, None, spec.num_kv_heads, spec.head_dim)
    inputs = [
        *([TensorSpec("input_ids", ("int64",), (None, None))] if is_drafter else []),
        TensorSpec("target_hidden" if is_drafter else "input_embeds", _FLOATS, (None, None, spec.hidden_size)),
        TensorSpec("position_ids", ("int64",), (None, None)),
        TensorSpec("attention_mask", _FLOATS, (None, 1, None, None)),
        *_declare_key_values("past", spec, kv_dtypes, entry),
    ]
    states = TensorSpec("hidden_states", _FLOATS, (None, None, spec.hidden_size))
    logits = TensorSpec("logits", _FLOATS, (None, None, spec.vocab_size))
    return inputs, [logits, states, *_declare_key_values("new", spec, kv_dtypes, entry)]


def declare_device_tensors(
    spec: DecoderSpec | DrafterSpec, is_drafter: bool, dtypes: tuple[str, ...], capacity: int | None = None
) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Return the inputs and outputs of a `make_device_graph`.

    Args:
        spec: sizes of the decoder.
        is_drafter: whether the decoder is the drafter, not the target.
        dtypes: allowed types of caches, and, after `get_hidden_dtype`, of hidden states.
        capacity: columns of a cache in order; None: columns in any order.
    """
    rows = tuple(map(get_hidden_dtype, dtypes))
    states = TensorSpec("hidden_states", rows, (None, None, spec.hidden_size))
    cache: tuple[int | None, ...] = (None, None, *choose_column_parts(spec.num_kv_heads * spec.head_dim))
    write: tuple[int | None, ...] = (None, None, 1, 3)
    if capacity is not None:
        cache = (None, spec.num_kv_heads, capacity, spec.head_dim)
        write = (None,)
    inputs = [
        TensorSpec("hidden", rows, states.shape)
        if is_drafter
        else TensorSpec("embeddings", rows, (None, spec.hidden_size)),
        TensorSpec("token_ids", ("int32",), (None, None)),
        *([TensorSpec("hidden_ids", ("int32",), (None, None))] if is_drafter else []),
        TensorSpec("position_ids", ("int64",), (None, None)),
        TensorSpec("write", ("int64",), write),
        TensorSpec("seen", ("int32",), (None, None, None)),
        *_declare_key_values("past", spec, dtypes, cache),
    ]
    logits = TensorSpec("logits", ("float32",), (None, None, spec.vocab_size))
    return inputs, [logits, states, *_declare_key_values("present", spec, dtypes, cache)]


def get_hidden_dtype(compute_dtype: str) -> str:
    """Return the NumPy dtype of hidden states for a decoder that computes in `compute_dtype`; NumPy has no bfloat16."""
    return "float32" if compute_dtype == "bfloat16" else compute_dtype


def _declare_key_values(
    name_prefix: str, spec: DecoderSpec | DrafterSpec, dtypes: tuple[str, ...], shape: tuple[int | None, ...]
) -> list[TensorSpec]:
    parts = ((i, part) for i in range(spec.num_layers) for part in ("key", "value"))
    return [TensorSpec(f"{name_prefix}_key_values.{i}.{part}", dtypes, shape) for i, part in parts]


def find_kv_dtype(graph_path: object, dtypes: DTypes) -> type[np.floating[Any]]:
    """Return the type of all keys and values. Raises: BundleError: they have two types."""
    kinds = {dtype for name, dtype in dtypes.items() if "key_values." in name}
    if len(kinds) > 1:
        both = "keys and values of both float16 and float32"
        raise BundleError(field=str(graph_path), found=both, expected="one type", remedy="export the bundle again")
    return np.float16 if np.float16 in kinds else np.float32


def check_past_length(batch: PassInput, cache: BaseKVCache) -> int:
    """Return the number of past columns of a pass. Raises: ValueError: it is not that of `padded_past_length`."""
    past: int = batch.attention_mask.shape[2] - batch.positions.shape[1]
    expected = cache.past_length()
    if not expected <= past <= cache.num_columns:
        raise ValueError(f"a pass over {past} past columns, expected {expected}, as `next_past_length` says")
    return past


def build_graph_inputs(batch: PassInput, embedding_table: Floats | None, dtypes: DTypes) -> dict[str, Array]:
    """Return a graph's inputs without the past, contiguous: tokens or embeddings, positions and attention mask.

    Args:
        embedding_table: embeddings of tokens, for targets; None: a drafter, which reads tokens and hidden states.
        dtypes: types of the inputs by name.
    """
    if embedding_table is None:
        if batch.tokens is None or batch.hidden is None:
            raise ValueError("a drafter reads `tokens` and `hidden`")
        states = batch.hidden.read() if isinstance(batch.hidden, HiddenStateView) else batch.hidden
        hidden = np.ascontiguousarray(states, dtypes["target_hidden"])
        rows = {"input_ids": np.ascontiguousarray(batch.tokens, np.int64), "target_hidden": hidden}
    else:
        if (batch.tokens is None) == (batch.embeds is None):
            raise ValueError("a target reads either `tokens` or `embeds`")
        embeds = batch.embeds if batch.tokens is None else np.take(embedding_table, batch.tokens, axis=0)
        rows = {"input_embeds": np.ascontiguousarray(embeds, dtypes["input_embeds"])}
    mask_dtype = dtypes["attention_mask"]
    return rows | {
        "position_ids": np.ascontiguousarray(batch.positions, np.int64),
        "attention_mask": np.where(batch.attention_mask, mask_dtype(0), mask_dtype(_MASKED[mask_dtype]))[:, None],
    }
