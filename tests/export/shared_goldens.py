"""Comparisons of exported graphs with recorded arrays, as base classes for the tests of each model family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from goldens import (
    GUIDED_TOLERANCE,
    Arrays,
    PromptRunner,
    assert_close,
    compute_graph_values,
    embed_tokens,
    read_manifest,
)
from guided_logits import mix_guided_logits
from numpy.typing import NDArray

from lantern_rt import Pipeline
from lantern_rt.export.compare import GraphFileSession
from lantern_rt.export.graph.graphs import HIDDEN
from lantern_rt.methods import Sampling
from lantern_rt.output.images import convert_pixels_to_image
from lantern_rt.prepared import compute_prefixes, load_model
from lantern_rt.runtime.groups import GroupLayout
from lantern_rt.runtime.likelihood import compute_sequence_logits
from lantern_rt.runtime.sampling import compute_distribution, process_logits
from lantern_rt.runtime.statistics import EngineTimer

ROW_NAMES = ("cond", "uncond")  # batch rows in the names of recorded arrays


@dataclass
class GoldenFamily:
    """Exported bundle of a model family, and the arrays recorded from the published implementation.

    Attributes:
        row_end: token id that ends each grid row; -1 for families without this token.
    """

    bundle: Path
    arrays: Arrays
    codes: slice
    row_end: int = -1
    scale: float = 3.0
    compute_scores: Callable[[NDArray[np.float32]], NDArray[np.float32]] = lambda scores: scores

    def start_prompt(self) -> PromptRunner:
        """Run the recorded conditional and unconditional prompt; return the runner for the tokens after the prompts."""
        first_code = None if self.row_end >= 0 else self.codes.start
        return PromptRunner(self.bundle, self.arrays["cond_ids"], self.arrays["uncond_ids"], first_code)


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
    cumulative = compute_distribution(logits, sampling).cumsum(1)
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


class DecoderGolden:
    """Tests of the target's graph; the module of a subclass defines the fixture `family`."""

    @pytest.mark.parametrize("row_name", ROW_NAMES)
    def test_the_prompt_has_the_recorded_outputs_keys_and_values(self, family: GoldenFamily, row_name: str) -> None:
        arrays = family.arrays
        ids = family.arrays[f"{row_name}_ids"]
        # `GraphRunner` uses consecutive positions from 0.
        assert arrays[f"{row_name}_position_ids"].tolist() == list(range(len(ids)))
        (out,) = PromptRunner(family.bundle, ids, None).outputs
        assert_close(out["hidden_states"][0], arrays[f"{row_name}_prefill_hidden"])
        # The recordings of some families have only the last positions.
        logits = arrays[f"{row_name}_prefill_logits"][:, family.codes]
        assert_close(out["logits"][0][-len(logits) :], logits)
        for part in ("key", "value"):
            tensors = [out[f"new_key_values.{i}.{part}"][:, 0] for i in range(3)]
            assert_close(np.stack(tensors).transpose(0, 2, 1, 3), arrays[f"{row_name}_prefill_{part}s"])

    def test_the_embeddings_and_every_layer_have_the_recorded_values(self, family: GoldenFamily) -> None:
        recorded = [row_name for row_name in ROW_NAMES if f"{row_name}_layer_hidden" in family.arrays]
        assert "cond" in recorded
        for row_name in recorded:
            embeds, layers = run_layers(family.bundle, family.arrays[f"{row_name}_ids"])
            assert_close(embeds[0], family.arrays[f"{row_name}_layer_hidden"][0], 0)
            assert_close(np.concatenate(layers), family.arrays[f"{row_name}_layer_hidden"][1:])

    def test_single_tokens_have_the_recorded_outputs(self, family: GoldenFamily) -> None:
        arrays = family.arrays
        runs = family.start_prompt()
        to_scores = family.compute_scores
        count = len(arrays["decode_cond_hidden"])
        steps = [runs.step(arrays["decode_tokens"][k : k + 1]) for k in range(count)]
        for i, row_name in enumerate(ROW_NAMES):
            assert_close(np.concatenate([s[i]["hidden_states"][0] for s in steps]), arrays[f"decode_{row_name}_hidden"])
            assert_close(
                np.concatenate([s[i]["logits"][0] for s in steps]), arrays[f"decode_{row_name}_logits"][:, family.codes]
            )
        guided = np.concatenate([mix_guided(step, family.scale) for step in steps])
        assert_close(to_scores(guided), to_scores(arrays["decode_guided"][-count:, family.codes]), GUIDED_TOLERANCE)

    def test_a_draft_tree_has_the_recorded_outputs_and_scores(self, family: GoldenFamily) -> None:
        arrays = family.arrays
        runs = family.start_prompt()
        codes = family.codes
        to_scores = family.compute_scores
        runs.step(arrays["decode_tokens"])
        depths = arrays["tree_depth"]
        parents = arrays["tree_parents"]
        assert depths.tolist() == [0 if p < 0 else depths[p] + 1 for p in parents]
        for run, row_name in zip(runs.row_runs, ROW_NAMES, strict=True):
            assert arrays[f"tree_{row_name}_position_ids"].tolist() == (run.length + depths).tolist()
        out = runs.step(arrays["tree_tokens"], depths, visible=arrays["tree_mask"] > 0)
        for outputs, row_name in zip(out, ROW_NAMES, strict=True):
            assert_close(outputs["hidden_states"][0], arrays[f"tree_{row_name}_hidden"])
            assert_close(outputs["logits"][0], arrays[f"tree_{row_name}_logits"][:, codes])
        guided = mix_guided(out, family.scale)
        assert_close(to_scores(guided), to_scores(arrays["tree_guided"][:, codes]), GUIDED_TOLERANCE)
        if family.row_end < 0:
            return  # the filtered scores are recorded only for families whose row ends are forced
        forced = arrays["tree_next_forced"]  # [nodes]: forced next token, or -1
        scores = arrays["tree_scores_topk20"]
        is_free = forced < 0
        # Tokens that are not codes are filtered out.
        assert not np.isfinite(np.delete(scores[is_free], np.r_[codes], 1)).any()
        filtered = process_logits(guided, Sampling(top_k=20))[is_free]
        np.testing.assert_array_equal(np.isfinite(filtered), np.isfinite(scores[is_free][:, codes]))
        np.testing.assert_allclose(
            to_scores(filtered), to_scores(scores[is_free][:, codes]), rtol=0, atol=GUIDED_TOLERANCE
        )
        for forced_scores in scores[~is_free]:
            assert np.flatnonzero(np.isfinite(forced_scores)).tolist() == [family.row_end]


class RowEndDecoderGolden(DecoderGolden):
    """Tests of the target's graph of a family whose grid rows end with a fixed token."""

    def test_the_table_embeds_the_codes_and_the_row_end_token(self, family: GoldenFamily) -> None:
        table = np.load(family.bundle / "code_embeddings.npy")
        codes = family.codes
        row_end = read_manifest(family.bundle).row_end
        between = range(codes.stop, family.row_end + 1) if family.row_end > codes.stop else [family.row_end]
        assert row_end == codes.stop - codes.start + len(between) - 1
        assert_close(table, embed_tokens(family.bundle, [*range(codes.start, codes.stop), *between])[0], 0)


def decode_image_values(bundle: Path, codes: np.ndarray) -> list[np.ndarray]:
    """Decode codes `[images, codes]`; return the images, and the input and output of the first convolution."""
    path = bundle / "vq_decoder.onnx"
    first_convolution = next(node for node in onnx.load(path).graph.node if node.op_type == "Conv")
    names = ["images", first_convolution.input[0], first_convolution.output[0]]
    return compute_graph_values(path, names, {"codes": codes})


class ImageTokenizerGolden:
    """Tests of the image tokenizer's graphs.

    The module of a subclass defines the fixture `tokenizer`: the folder of a bundle, and its recorded arrays by name.
    """

    def test_codes_decode_to_the_recorded_vectors_latents_and_images(self, tokenizer: tuple[Path, Arrays]) -> None:
        bundle, arrays = tokenizer
        images, vectors, latents = decode_image_values(bundle, arrays["codes"])
        assert_close(vectors, arrays["code_vectors"])
        assert_close(images, arrays["decoded"])
        if "post_quant" in arrays:
            assert_close(latents, arrays["post_quant"])
        for image, expected in zip(images, arrays.get("decoded_uint8", []), strict=False):
            assert np.abs(np.asarray(convert_pixels_to_image(image)).astype(int) - expected).max() <= 1

    def test_images_encode_to_the_recorded_latents_and_codes(self, tokenizer: tuple[Path, Arrays]) -> None:
        bundle, arrays = tokenizer
        outputs = GraphFileSession(bundle / "vq_encoder.onnx").run({"images": arrays["image"]})
        assert_close(outputs["pre_quant"], arrays["pre_quant"])
        np.testing.assert_array_equal(outputs["codes"], arrays["encoded_codes"])
        if "reconstruction" in arrays:
            image, vectors, _ = decode_image_values(bundle, outputs["codes"])
            assert_close(vectors, arrays["quantized"])
            assert_close(image, arrays["reconstruction"])
