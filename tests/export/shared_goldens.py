"""Golden tests that several exporter families share: the test module of a family subclasses these classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from goldens import GUIDED, Arrays, Sides, close, embed, manifest, observed
from guided_logits import guide
from numpy.typing import NDArray

from lantern_rt import Pipeline
from lantern_rt.export.compare import GraphFileSession
from lantern_rt.export.graph.graphs import HIDDEN
from lantern_rt.methods import Sampling
from lantern_rt.output.images import to_image
from lantern_rt.prepared import compute_prefixes, load_model
from lantern_rt.runtime.groups import GroupLayout
from lantern_rt.runtime.likelihood import compute_sequence_logits
from lantern_rt.runtime.sampling import compute_distribution, process_logits
from lantern_rt.runtime.statistics import Clock

SIDES = ("cond", "uncond")


@dataclass
class Family:
    """An exported bundle and the arrays recorded from the published implementation.

    codes: ids of the image tokens. row_end: id of the token that ends a row; -1 if none does. scale: guidance scale.
    scored: maps guided logits to the scores that the published program records.
    """

    bundle: Path
    arrays: Arrays
    codes: slice
    row_end: int = -1
    scale: float = 3.0
    scored: Callable[[NDArray[np.float32]], NDArray[np.float32]] = lambda scores: scores

    def sides(self) -> Sides:
        first = None if self.row_end >= 0 else self.codes.start
        return Sides(self.bundle, self.arrays["cond_ids"], self.arrays["uncond_ids"], first)


def log_softmax(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return log-probabilities; -inf stays -inf."""
    wide = scores.astype(np.float64)
    total = np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1, keepdims=True))
    return (wide - wide.max(-1, keepdims=True) - total).astype(np.float32)


def mixed(outputs: list[Arrays], scale: float = 3.0) -> NDArray[np.float32]:
    """Return guided logits `[nodes, codes]` from both batch rows' outputs."""
    return guide(np.concatenate([out["logits"] for out in outputs]), Sampling(cfg_scale=scale))


def run_layers(bundle: Path, ids: Any) -> tuple[NDArray[np.float32], list[NDArray[np.float32]]]:
    """Return the embeddings of token ids, and every layer's hidden states; the last layer's are normed."""
    path = bundle / "target.onnx"
    spec = manifest(bundle).target
    layers = layer_sums(bundle)
    embeds = embed(bundle, ids)
    nodes = len(ids)
    feeds = {"input_embeds": embeds, "position_ids": np.arange(nodes)[None]}
    feeds["attention_mask"] = np.where(np.tri(nodes), 0, HIDDEN).astype(np.float32)[None, None]
    empty = np.zeros((0, 1, spec.num_kv_heads, spec.head_dim), np.float32)
    feeds |= {f"past_key_values.{i}.{part}": empty for i in range(3) for part in ("key", "value")}
    *states, last = observed(path, [*layers[2:-1:2], "hidden_states"], feeds)
    return embeds, [*(state.swapaxes(0, 1) for state in states), last]


def order_of(pipe: Pipeline) -> GroupLayout:
    """Return the layout of a bundle that draws groups."""
    layout = pipe.bundle.manifest.layout()
    assert isinstance(layout, GroupLayout)
    return layout


def logits_of(pipe: Pipeline, ids: Any, **prompt: Any) -> NDArray[np.float32]:
    """Logits of both rows of all codes, `[2, codes, vocabulary]`, by passes over many groups at once.

    ids: codes in the order of drawing.
    """
    model = load_model(pipe.bundle, pipe.engines, [])
    (rows,) = compute_prefixes(pipe.bundle, pipe.engines, pipe.check(**prompt).images)
    layout = pipe.bundle.manifest.layout()
    return np.concatenate(
        [*compute_sequence_logits(model, layout, [rows.cond, rows.uncond], np.array(ids), Clock())], 1
    )


def check_logits(
    name: str, index: int, trace: dict[str, Any], both: NDArray[np.float32], arrays: Arrays
) -> NDArray[np.float32]:
    """Compare logits of a recorded run with its arrays; return the guided ones, `[codes, vocabulary]`.

    both: logits of both rows, sorted as the run's arrays.
    """
    guidance = Sampling(cfg_scale=trace["cfg"])
    guided = np.array(trace.get("guided", [1] * both.shape[1]), bool)
    used = np.where(guided[:, None], guide(both, guidance), both[0]) if guidance.guided else both[0]
    if f"{name}_used_logits" in arrays:
        close(used, arrays[f"{name}_used_logits"][index], GUIDED)
    if f"{name}_cond_logits" in arrays:
        close(both[0], arrays[f"{name}_cond_logits"][index])
        close(both[1], arrays[f"{name}_uncond_logits"][index])
    return used


def choices(used: NDArray[np.float32], index: int, trace: dict[str, Any]) -> list[int]:
    """Return the codes that a recorded run draws from guided logits; both are in the order of drawing."""
    if not trace["sample"]:
        return used.argmax(1).tolist()
    sampling = Sampling(**{field: trace[field] for field in ("temperature", "top_k", "top_p")})
    sums = compute_distribution(used, sampling).cumsum(1)
    return (sums / sums[:, -1:] <= np.array(trace["uniform"][index])[:, None]).sum(1).tolist()


def run_all(pipe: Pipeline, ids: Any, names: list[str], **prompt: Any) -> list[NDArray[np.float32]]:
    """The embeddings of both rows, and values inside the graph, of one pass over the prefix and all codes.

    ids: codes in the order of drawing.
    """
    order = order_of(pipe)
    everything = order.lay_out(range(1, len(order.groups)), ids)
    (rows,) = compute_prefixes(pipe.bundle, pipe.engines, pipe.check(**prompt).images)
    codes = pipe.bundle.code_embeddings[everything.tokens]
    embeds = np.stack([np.concatenate([row.embeds, codes]) for row in (rows.cond, rows.uncond)])
    nodes = embeds.shape[1]
    spec = pipe.bundle.manifest.target
    prefix = len(rows.cond.embeds)
    mask = np.tile(np.tri(nodes, dtype=bool), (2, 1, 1))
    mask[:, prefix:, prefix:] = everything.ancestors
    for seen, row in zip(mask, (rows.cond, rows.uncond), strict=True):
        seen[:, :prefix] &= row.is_real
    mask |= np.eye(nodes, dtype=bool)
    positions = np.array([*range(prefix), *(prefix + everything.positions)])
    feeds = {"input_embeds": embeds, "position_ids": np.tile(positions, (2, 1))}
    feeds["attention_mask"] = np.where(mask, 0, HIDDEN).astype(np.float32)[:, None]
    empty = np.zeros((0, 2, spec.num_kv_heads, spec.head_dim), np.float32)
    feeds |= {f"past_key_values.{i}.{part}": empty for i in range(spec.num_layers) for part in ("key", "value")}
    return [embeds, *observed(pipe.bundle.path("target"), names, feeds)]


def layer_sums(bundle: Path) -> list[str]:
    """Return the name of the turned embeddings in a target's graph, and of all sums of the residual stream."""
    nodes = onnx.load(bundle / "target.onnx").graph.node
    sums = [node for node in nodes if node.op_type == "Add"]
    names = [node.output[0] for node in nodes if node.input[0] == "input_embeds"]  # turned: nodes before rows
    while following := [node.output[0] for node in sums if node.input[0] == names[-1]]:
        names += following  # each layer adds attention, then feed-forward
    return names


class DecoderGolden:
    """Tests of the target's graph; the subclass's module defines the fixture `family`."""

    @pytest.mark.parametrize("side", SIDES)
    def test_prefill_hidden_logits_keys_and_values_of_both_rows(self, family: Family, side: str) -> None:
        arrays = family.arrays
        ids = family.arrays[f"{side}_ids"]
        assert arrays[f"{side}_position_ids"].tolist() == list(range(len(ids)))  # as `Run` counts
        (out,) = Sides(family.bundle, ids, None).outputs
        close(out["hidden_states"][0], arrays[f"{side}_prefill_hidden"])
        logits = arrays[f"{side}_prefill_logits"][:, family.codes]  # some families recorded those of the last positions
        close(out["logits"][0][-len(logits) :], logits)
        for part in ("key", "value"):
            found = np.stack(
                [out[f"new_key_values.{i}.{part}"][:, 0] for i in range(3)]
            )  # [layers, nodes, heads, width]
            close(found.transpose(0, 2, 1, 3), arrays[f"{side}_prefill_{part}s"])

    def test_layer_hidden_embeddings_every_layer_and_the_last_one_normed(self, family: Family) -> None:
        recorded = [side for side in SIDES if f"{side}_layer_hidden" in family.arrays]
        assert "cond" in recorded
        for side in recorded:
            embeds, layers = run_layers(family.bundle, family.arrays[f"{side}_ids"])
            close(embeds[0], family.arrays[f"{side}_layer_hidden"][0], 0)
            close(np.concatenate(layers), family.arrays[f"{side}_layer_hidden"][1:])

    def test_decode_tokens_one_at_a_time_give_hidden_logits_and_guided_of_both_rows(self, family: Family) -> None:
        arrays = family.arrays
        sides = family.sides()
        scored = family.scored
        count = len(arrays["decode_cond_hidden"])
        steps = [sides.step(arrays["decode_tokens"][k : k + 1]) for k in range(count)]
        for i, side in enumerate(SIDES):
            close(np.concatenate([s[i]["hidden_states"][0] for s in steps]), arrays[f"decode_{side}_hidden"])
            close(np.concatenate([s[i]["logits"][0] for s in steps]), arrays[f"decode_{side}_logits"][:, family.codes])
        guided = np.concatenate([mixed(step, family.scale) for step in steps])
        close(scored(guided), scored(arrays["decode_guided"][-count:, family.codes]), GUIDED)

    def test_tree_behind_the_decode_tokens_gives_hidden_logits_guided_and_filtered_scores(self, family: Family) -> None:
        arrays = family.arrays
        sides = family.sides()
        codes = family.codes
        scored = family.scored
        sides.step(arrays["decode_tokens"])
        depths = arrays["tree_depth"]
        parents = arrays["tree_parents"]
        assert depths.tolist() == [0 if p < 0 else depths[p] + 1 for p in parents]
        for run, side in zip(sides.runs, SIDES, strict=True):
            assert arrays[f"tree_{side}_position_ids"].tolist() == (run.length + depths).tolist()
        out = sides.step(arrays["tree_tokens"], depths, visible=arrays["tree_mask"] > 0)
        for own, side in zip(out, SIDES, strict=True):
            close(own["hidden_states"][0], arrays[f"tree_{side}_hidden"])
            close(own["logits"][0], arrays[f"tree_{side}_logits"][:, codes])
        guided = mixed(out, family.scale)
        close(scored(guided), scored(arrays["tree_guided"][:, codes]), GUIDED)
        if family.row_end < 0:
            return  # nothing was forced
        forced = arrays["tree_next_forced"]
        scores = arrays["tree_scores_topk20"]
        free = forced < 0
        assert not np.isfinite(np.delete(scores[free], np.r_[codes], 1)).any()  # nothing but codes
        found = process_logits(guided, Sampling(top_k=20))[free]
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(scores[free][:, codes]))
        np.testing.assert_allclose(scored(found), scored(scores[free][:, codes]), rtol=0, atol=GUIDED)
        assert [np.flatnonzero(np.isfinite(row)).tolist() for row in scores[~free]] == [[family.row_end]] * sum(~free)


class RowEndDecoderGolden(DecoderGolden):
    """Tests of a family whose grid rows end with a token."""

    def test_the_table_of_embeddings_holds_the_codes_and_the_end_of_a_row(self, family: Family) -> None:
        table = np.load(family.bundle / "code_embeddings.npy")
        codes = family.codes
        row_end = manifest(family.bundle).row_end
        between = range(codes.stop, family.row_end + 1) if family.row_end > codes.stop else [family.row_end]
        assert row_end == codes.stop - codes.start + len(between) - 1
        close(table, embed(family.bundle, [*range(codes.start, codes.stop), *between])[0], 0)


def decoded(bundle: Path, codes: np.ndarray) -> list[np.ndarray]:
    """Return images, and the input and output of the decoder's first convolution."""
    path = bundle / "vq_decoder.onnx"
    first = next(node for node in onnx.load(path).graph.node if node.op_type == "Conv")
    return observed(path, ["images", first.input[0], first.output[0]], {"codes": codes})


class ImageTokenizerGolden:
    """Tests of the image tokenizer's graphs; the module defines the fixture `tokenizer`, a bundle and its arrays."""

    def test_codes_become_the_recorded_vectors_latents_and_images(self, tokenizer: tuple[Path, Arrays]) -> None:
        bundle, arrays = tokenizer
        images, vectors, latents = decoded(bundle, arrays["codes"])
        close(vectors, arrays["code_vectors"])
        close(images, arrays["decoded"])
        if "post_quant" in arrays:
            close(latents, arrays["post_quant"])
        for found, expected in zip(images, arrays.get("decoded_uint8", []), strict=False):
            assert np.abs(np.asarray(to_image(found)).astype(int) - expected).max() <= 1

    def test_images_become_the_recorded_latents_and_codes_and_these_the_reconstruction(
        self, tokenizer: tuple[Path, Arrays]
    ) -> None:
        bundle, arrays = tokenizer
        found = GraphFileSession(bundle / "vq_encoder.onnx").run({"images": arrays["image"]})
        close(found["pre_quant"], arrays["pre_quant"])
        np.testing.assert_array_equal(found["codes"], arrays["encoded_codes"])
        if "reconstruction" in arrays:
            image, vectors, _ = decoded(bundle, found["codes"])
            close(vectors, arrays["quantized"])
            close(image, arrays["reconstruction"])
