"""Declarations of the inputs and outputs of target and drafter graphs, and the input values of a forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..bundle.manifest import DecoderSizes, DecoderSpec
from ..errors import BundleError
from ..runtime.engine import Floats, PassInput, read_hidden_states
from .contracts import Array, DTypes, TensorSpec
from .graph_writer import choose_column_part_shape
from .kv_cache import BaseKVCache

_FLOATS = ("float32", "float16")
# Numbers that attention adds to the scores of masked columns. They are finite, as softmax of a row of infinities is
# NaN, and so large that the weight of a masked column is 0.
_MASKED = {np.float32: -1e30, np.float16: -6e4}


def declare_host_tensors(spec: DecoderSizes) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Declare the inputs, and the outputs, of a decoder graph of a bundle; keys and values come last."""
    nodes = ("rows", "nodes")
    floats: tuple[str, ...] = (get_hidden_dtype(spec.dtype),) if isinstance(spec, DecoderSpec) else _FLOATS
    entry = ("rows", spec.num_kv_heads, spec.head_dim)
    read_by_drafter = [
        TensorSpec("input_ids", ("int64",), nodes),
        TensorSpec("target_hidden", floats, (*nodes, spec.hidden_size)),
    ]
    read_by_target = [TensorSpec("input_embeds", floats, (*nodes, spec.hidden_size))]
    inputs = [
        *(read_by_drafter if spec.role == "drafter" else read_by_target),
        TensorSpec("position_ids", ("int64",), nodes),
        TensorSpec("attention_mask", floats, ("rows", 1, "nodes", "past + nodes")),
        *_declare_key_values("past", spec, floats, ("past", *entry)),
    ]
    states = TensorSpec("hidden_states", floats, (*nodes, spec.hidden_size))
    logits = TensorSpec("logits", ("float32",), (*nodes, spec.vocab_size))
    return inputs, [logits, states, *_declare_key_values("new", spec, floats, ("nodes", *entry))]


def declare_device_tensors(
    spec: DecoderSizes, dtypes: tuple[str, ...], capacity: int | None
) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Declare the inputs, and the outputs, of a decoder graph in the device layout (`device_graph.py`).

    The cache may have any type of `dtypes`. With a capacity, its entries are in order.
    """
    is_drafter = spec.role == "drafter"
    hidden_dtypes = tuple(map(get_hidden_dtype, dtypes))
    states = TensorSpec("hidden_states", hidden_dtypes, (None, None, spec.hidden_size))
    cache: tuple[int | None, ...] = (None, None, *choose_column_part_shape(spec.num_kv_heads * spec.head_dim))
    write: tuple[int | None, ...] = (None, None, 1, 3)  # [rows, nodes, 1, 3]: row, column and first part of each node
    if capacity is not None:
        cache = (None, spec.num_kv_heads, capacity, spec.head_dim)
        write = (None,)  # [rows]: first column that a pass writes
    inputs = [
        TensorSpec("hidden", hidden_dtypes, states.shape)
        if is_drafter
        else TensorSpec("embeddings", hidden_dtypes, (None, spec.hidden_size)),
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
    """Return the type of hidden states: float32 for bfloat16, as NumPy, which holds them on the host, has none."""
    return "float32" if compute_dtype == "bfloat16" else compute_dtype


def _declare_key_values(
    name_prefix: str, spec: DecoderSizes, dtypes: tuple[str, ...], shape: tuple[int | str | None, ...]
) -> list[TensorSpec]:
    parts = ((i, part) for i in range(spec.num_layers) for part in ("key", "value"))
    return [TensorSpec(f"{name_prefix}_key_values.{i}.{part}", dtypes, shape) for i, part in parts]


def find_kv_dtype(graph_path: object, dtypes: DTypes) -> type[np.floating[Any]]:
    """Return the type that all keys and values of a graph have, or raise BundleError if they differ."""
    kv_dtypes = {dtype for name, dtype in dtypes.items() if "key_values." in name}
    if len(kv_dtypes) > 1:
        actual = "keys and values of both float16 and float32"
        remedy = "export the bundle again"
        raise BundleError(field=str(graph_path), found=actual, expected="one type for all", remedy=remedy)
    return np.float16 if np.float16 in kv_dtypes else np.float32


def check_pass_input(batch: PassInput, cache: BaseKVCache, spec: DecoderSizes) -> int:
    """Return how many cache columns the mask of a pass covers.

    Raises:
        ValueError: the mask covers too few or too many columns, an input that the decoder reads is missing, or a target
            gets both tokens and embeddings.
    """
    past: int = batch.attention_mask.shape[2] - batch.positions.shape[1]
    expected = cache.past_length()
    if not expected <= past <= cache.num_columns:
        raise ValueError(f"the pass reads {past} columns of the cache, expected {expected} .. {cache.num_columns}")
    if spec.role == "drafter":
        if batch.tokens is None or batch.hidden is None:
            raise ValueError("a drafter reads `tokens` and `hidden`")
    elif (batch.tokens is None) == (batch.embeds is None):
        raise ValueError("the input of a target needs either `tokens` or `embeds`, not both")
    return past


def build_graph_inputs(batch: PassInput, embedding_table: Floats | None, dtypes: DTypes) -> dict[str, Array]:
    """Return the inputs of a decoder graph except keys and values, as contiguous arrays by name.

    Only a target has an embedding table.
    """
    if embedding_table is None:
        assert batch.hidden is not None
        hidden = np.ascontiguousarray(read_hidden_states(batch.hidden), dtypes["target_hidden"])
        rows = {"input_ids": np.ascontiguousarray(batch.tokens, np.int64), "target_hidden": hidden}
    else:
        embeds = batch.embeds if batch.tokens is None else np.take(embedding_table, batch.tokens, axis=0)
        rows = {"input_embeds": np.ascontiguousarray(embeds, dtypes["input_embeds"])}
    mask_dtype = dtypes["attention_mask"]
    return rows | {
        "position_ids": np.ascontiguousarray(batch.positions, np.int64),
        "attention_mask": np.where(batch.attention_mask, mask_dtype(0), mask_dtype(_MASKED[mask_dtype]))[:, None],
    }
