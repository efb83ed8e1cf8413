"""Comparisons of exported graphs with recorded arrays, as base classes for the tests of each model family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from goldens import GUIDED_TOLERANCE, Arrays, assert_close, compute_graph_values, embed_tokens, read_manifest
from guided_logits import make_sampler, mix_guided_logits
from numpy.typing import NDArray

from lantern_rt import Pipeline
from lantern_rt.export.graph.graphs import HIDDEN
from lantern_rt.methods import Sampling
from lantern_rt.prepared import compute_prefixes, load_model
from lantern_rt.runtime.groups import GroupLayout
from lantern_rt.runtime.likelihood import compute_sequence_logits
from lantern_rt.runtime.statistics import EngineTimer

ROW_NAMES = ("cond", "uncond")  # batch rows in the names of recorded arrays


def log_softmax(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return log-probabilities over the last axis; -inf stays -inf."""
    scores64 = scores.astype(np.float64)
    total = np.log(np.exp(scores64 - scores64.max(-1, keepdims=True)).sum(-1, keepdims=True))
    return (scores64 - scores64.max(-1, keepdims=True) - total).astype(np.float32)


def mix_guided(outputs: list[Arrays], scale: float = 3.0) -> NDArray[np.float32]:
    return mix_guided_logits(np.concatenate([out["logits"] for out in outputs]), Sampling(cfg_scale=scale))


def run_layers(bundle: Path, ids: Any) -> tuple[NDArray[np.float32], list[NDArray[np.float32]]]:
    """Run the target's graph, of three layers, over token ids.

    Returns:
        The embeddings `[1, tokens, width]`, and the hidden states after every layer in the same shape. The hidden
        states of the last layer are normalized.
    """
    path = bundle / "target.onnx"
    spec = read_manifest(bundle).target
    names = list_residual_names(bundle)
    embeds = embed_tokens(bundle, ids)
    nodes = len(ids)
    feeds = {"input_embeds": embeds, "position_ids": np.arange(nodes)[None]}
    feeds["attention_mask"] = np.where(np.tri(nodes), 0, HIDDEN).astype(np.float32)[None, None]
    empty = np.zeros((0, 1, spec.num_kv_heads, spec.head_dim), np.float32)
    feeds |= {f"past_key_values.{i}.{part}": empty for i in range(3) for part in ("key", "value")}
    *states, last = compute_graph_values(path, [*names[2:-1:2], "hidden_states"], feeds)
    return embeds, [*(state.swapaxes(0, 1) for state in states), last]


def get_group_layout(pipe: Pipeline) -> GroupLayout:
    """Return the layout of a pipeline whose model generates groups of cells."""
    layout = pipe.bundle.manifest.layout()
    assert isinstance(layout, GroupLayout)
    return layout


def compute_logits(pipe: Pipeline, ids: Any, **prompt: Any) -> NDArray[np.float32]:
    """Compute the logits `[2, codes, vocabulary]` of an image, many groups of cells per forward pass.

    The first row is conditional, the second unconditional.
    """
    model = load_model(pipe.bundle, pipe.engines, [])
    (rows,) = compute_prefixes(pipe.bundle, pipe.engines, pipe.check(**prompt).images)
    layout = pipe.bundle.manifest.layout()
    return np.concatenate(
        [*compute_sequence_logits(model, layout, [rows.cond, rows.uncond], np.array(ids), EngineTimer())], 1
    )


def check_logits(
    run_name: str, image_index: int, trace: dict[str, Any], row_logits: NDArray[np.float32], arrays: Arrays
) -> NDArray[np.float32]:
    """Compare the logits of an image with recorded arrays; return the logits after guidance, `[codes, vocabulary]`.

    Args:
        row_logits: logits `[2, codes, vocabulary]` of the conditional and the unconditional row, in the same order of
            codes as the arrays.
    """
    guidance = Sampling(cfg_scale=trace["cfg"])
    is_guided = np.array(trace.get("guided", [1] * row_logits.shape[1]), bool)  # [codes]
    sampling_logits = row_logits[0]
    if guidance.uses_guidance:
        sampling_logits = np.where(is_guided[:, None], mix_guided_logits(row_logits, guidance), row_logits[0])
    if f"{run_name}_used_logits" in arrays:
        assert_close(sampling_logits, arrays[f"{run_name}_used_logits"][image_index], GUIDED_TOLERANCE)
    if f"{run_name}_cond_logits" in arrays:
        assert_close(row_logits[0], arrays[f"{run_name}_cond_logits"][image_index])
        assert_close(row_logits[1], arrays[f"{run_name}_uncond_logits"][image_index])
    return sampling_logits


def sample_recorded_codes(logits: NDArray[np.float32], image_index: int, trace: dict[str, Any]) -> list[int]:
    """Return the codes that a recorded run samples from logits, in generation order.

    Args:
        logits: logits after guidance, `[codes, vocabulary]`, in generation order.
    """
    if not trace["sample"]:
        return logits.argmax(1).tolist()
    sampling = Sampling(**{field: trace[field] for field in ("temperature", "top_k", "top_p")})
    cumulative = make_sampler(sampling).compute_distribution(logits).cumsum(1)
    return (cumulative / cumulative[:, -1:] <= np.array(trace["uniform"][image_index])[:, None]).sum(1).tolist()


def run_whole_sequence(pipe: Pipeline, ids: Any, names: list[str], **prompt: Any) -> list[NDArray[np.float32]]:
    """Run the prefix and all codes of an image in one forward pass of the target's graph.

    Returns:
        The embeddings `[2, nodes, width]` of the conditional and the unconditional row, then the named values.
    """
    layout = get_group_layout(pipe)
    code_pass = layout.lay_out_groups(range(1, len(layout.groups)), ids)
    (rows,) = compute_prefixes(pipe.bundle, pipe.engines, pipe.check(**prompt).images)
    codes = pipe.bundle.code_embeddings[code_pass.tokens]
    embeds = np.stack([np.concatenate([row.embeds, codes]) for row in (rows.cond, rows.uncond)])
    nodes = embeds.shape[1]
    spec = pipe.bundle.manifest.target
    prefix = len(rows.cond.embeds)
    mask = np.tile(np.tri(nodes, dtype=bool), (2, 1, 1))
    mask[:, prefix:, prefix:] = code_pass.ancestor_mask
    for row_mask, row in zip(mask, (rows.cond, rows.uncond), strict=True):
        row_mask[:, :prefix] &= row.is_real_token
    mask |= np.eye(nodes, dtype=bool)
    positions = np.array([*range(prefix), *(prefix + code_pass.positions)])
    feeds = {"input_embeds": embeds, "position_ids": np.tile(positions, (2, 1))}
    feeds["attention_mask"] = np.where(mask, 0, HIDDEN).astype(np.float32)[:, None]
    empty = np.zeros((0, 2, spec.num_kv_heads, spec.head_dim), np.float32)
    feeds |= {f"past_key_values.{i}.{part}": empty for i in range(spec.num_layers) for part in ("key", "value")}
    return [embeds, *compute_graph_values(pipe.bundle.path("target"), names, feeds)]


def list_residual_names(bundle: Path) -> list[str]:
    """Return the names of the residual stream's values in a target's graph, from the embeddings to the last layer."""
    nodes = onnx.load(bundle / "target.onnx").graph.node
    sums = [node for node in nodes if node.op_type == "Add"]
    names = [node.output[0] for node in nodes if node.input[0] == "input_embeds"]  # transposed to [nodes, rows, width]
    while following := [node.output[0] for node in sums if node.input[0] == names[-1]]:
        names += following  # each layer adds attention, then feed-forward
    return names
