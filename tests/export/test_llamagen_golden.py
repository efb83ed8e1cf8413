"""LlamaGen's exported graphs compared with recordings of the published implementation and of LANTERN's classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from goldens import GUIDED_TOLERANCE, Arrays, GraphRun, assert_close, guide, load_golden, read_manifest
from numpy.typing import NDArray
from onnx import numpy_helper
from shared_goldens import ImageTokenizerGolden

from lantern_rt import Pipeline
from lantern_rt.export.compare import GraphFileSession

INPUTS = {"c2i": {"class_ids": "class_ids"}, "t2i": {"caption_embeds": "caption_emb", "caption_mask": "emb_mask"}}


def condition(bundle: Path, **inputs: NDArray[np.generic]) -> NDArray[np.float32]:
    """Return the embeddings of all conditional prefixes, then of all unconditional prefixes."""
    out = GraphFileSession(bundle / "condition.onnx").run(inputs)
    return np.concatenate([out["prefix_embeds"], out["uncond_embeds"]])


def rotary_table(path: Path) -> np.ndarray:
    weights = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    cos = weights["rotary.cos"]
    sin = weights["rotary.sin"]
    np.testing.assert_array_equal(cos[:, ::2], cos[:, 1::2])
    np.testing.assert_array_equal(sin[:, ::2], -sin[:, 1::2])
    return np.stack([cos[:, ::2], sin[:, 1::2]], -1)


class Target:
    """Runs a target, starting with its prefill, and holds the recorded arrays.

    Args:
        bundle: folder of the bundle.
        folder: folder of the recorded arrays.
        lantern: whether padded positions of a prefix attend to all later unpadded positions, as in LANTERN's code,
            instead of only to themselves.
        guided: whether there are unconditional rows, with the masks of the conditional rows.
        masked: whether padding of captions is masked.
    """

    def __init__(
        self, bundle: Path, folder: str, lantern: bool = False, guided: bool = True, masked: bool = True
    ) -> None:
        self.bundle = bundle
        self.golden = load_golden(folder)
        inputs = {name: self.golden[array] for name, array in INPUTS[folder[-3:]].items()}
        if not masked:
            inputs["caption_mask"] = np.ones_like(inputs["caption_mask"])
        self.rows_per_image = 2 if guided else 1
        images = len(next(iter(inputs.values())))
        self.prefix = condition(bundle, **inputs)[: self.rows_per_image * images]
        ones = np.ones((images, self.prefix.shape[1]), np.int64)
        is_real_token = np.tile(inputs.get("caption_mask", ones) > 0, (self.rows_per_image, 1))
        self.codes = np.load(bundle / "code_embeddings.npy")
        self.run = GraphRun(bundle, rows=len(self.prefix))
        self.prefill_output = self.run.step(visible(is_real_token, lantern), is_real_token, input_embeds=self.prefix)

    def feed(self, tokens: np.ndarray, **layout: np.ndarray) -> Arrays:
        """Run codes `[images, nodes]` in all rows of each image."""
        return self.run.step(input_embeds=self.codes[np.tile(tokens, (self.rows_per_image, 1))], **layout)

    def predict_recorded_tokens(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the logits and hidden states that predict each recorded token."""
        output = self.feed(self.golden["tokens"][:, :-1])
        logits, hidden = (
            np.concatenate([self.prefill_output[name][:, -1:], output[name]], 1) for name in ("logits", "hidden_states")
        )
        return logits, hidden


def visible(real: np.ndarray, lantern: bool) -> np.ndarray:
    """Return the attention mask among the positions of a prefix; `real [rows, nodes]` is false at padding."""
    causal = np.tri(real.shape[1], dtype=bool)
    if lantern:
        return np.where(real[:, :, None], causal & real[:, None], causal | real[:, None])
    return causal & real[:, None] | np.eye(real.shape[1], dtype=bool)


# ---------------------------------------------------------------- the official layout


@pytest.fixture(scope="module", params=["c2i", "t2i"])
def official(request: pytest.FixtureRequest) -> tuple[Path, str]:
    return request.getfixturevalue(f"{request.param}_bundle"), f"llamagen-{request.param}"


def test_teacher_forced_logits_and_hidden_states_are_reproduced(official: tuple[Path, str]) -> None:
    target = Target(*official)
    logits, hidden = target.predict_recorded_tokens()
    assert_close(logits, target.golden["tf_logits"])
    assert_close(hidden, target.golden["tf_hidden"])
    assert_close(guide(logits, 4.0), target.golden["tf_logits_cfg4"], GUIDED_TOLERANCE)
    assert_close(Target(*official, guided=False).predict_recorded_tokens()[0], target.golden["tf_logits_nocfg"])


def test_without_guidance_an_image_is_one_row_and_has_the_recorded_ids(
    c2i_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = Pipeline.from_bundle(c2i_bundle, threads=1)
    arrays = load_golden("llamagen-c2i")
    rows = []
    run = pipe.engines.target.run
    monkeypatch.setattr(
        pipe.engines.target, "run", lambda batch, cache: rows.append(len(batch.positions)) or run(batch, cache)
    )
    result = pipe(class_ids=arrays["class_ids"].tolist(), cfg_scale=1.0, temperature=0, method="ar")
    np.testing.assert_array_equal(np.reshape(result.codes, (3, -1)), arrays["greedy_ids_cfg1"])
    assert set(rows) == {len(arrays["class_ids"])}


def test_padding_is_masked_and_zeroed_as_published_unless_the_mask_includes_it(t2i_bundle: Path) -> None:
    target = Target(t2i_bundle, "llamagen-t2i")
    arrays = target.golden
    assert_close(target.prefill_output["logits"], arrays["prefill_logits"])
    assert_close(target.prefill_output["hidden_states"], arrays["prefill_hidden"])
    assert_close(
        Target(t2i_bundle, "llamagen-t2i", masked=False).predict_recorded_tokens()[0], arrays["tf_logits_nomask"]
    )
    noisy_embeds = np.where(arrays["emb_mask"][..., None] > 0, arrays["caption_emb"], np.float32(7))
    assert_close(condition(t2i_bundle, caption_embeds=noisy_embeds, caption_mask=arrays["emb_mask"]), target.prefix, 0)


@pytest.mark.parametrize(
    ("fixture", "role", "folder"),
    [
        ("c2i_bundle", "target", "llamagen-c2i"),
        ("t2i_bundle", "target", "llamagen-t2i"),
        ("lantern_c2i_bundle", "target", "lantern-llamagen-hf/c2i"),
        ("lantern_t2i_bundle", "target", "lantern-llamagen-hf/t2i"),
        ("t2i_drafter_bundle", "drafter", "lantern-drafter-llamagen"),  # its table starts one row later
    ],
)
def test_the_rotary_table_is_the_published_one_and_ends_in_zeros(
    request: pytest.FixtureRequest, fixture: str, role: str, folder: str
) -> None:
    table = rotary_table(request.getfixturevalue(fixture) / f"{role}.onnx")
    expected = load_golden(folder)["rope_table"]
    assert_close(table[: len(expected)], expected, 1e-6)
    assert len(table) >= len(expected) + 10
    assert not table[len(expected) :].any()


def test_opset_and_ir_version_are_supported_by_runtimes(t2i_drafter_bundle: Path) -> None:
    for path in t2i_drafter_bundle.glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        assert model.ir_version <= 10
        assert [(o.domain, o.version <= 23) for o in model.opset_import] == [("", True)]
        onnx.checker.check_model(str(path), full_check=True)


# ---------------------------------------------------------------- LANTERN's layout


@pytest.fixture(params=["c2i", "t2i"])
def lantern(request: pytest.FixtureRequest) -> Target:
    bundle = request.getfixturevalue(f"lantern_{request.param}_bundle")
    return Target(bundle, f"lantern-llamagen-hf/{request.param}", lantern=True)


def test_the_prefill_is_reproduced_with_its_keys_and_values(lantern: Target) -> None:
    assert_close(lantern.prefill_output["hidden_states"], lantern.golden["prefill_hidden"])
    assert_close(lantern.prefill_output["logits"], lantern.golden["prefill_logits"])
    for part in ("key", "value"):
        for layer, expected in enumerate(lantern.golden[f"prefill_{part}s"]):
            assert_close(lantern.run.past[f"{layer}.{part}"].transpose(1, 2, 0, 3), expected)


def test_codes_token_by_token_and_a_tree_after_them_are_reproduced(lantern: Target) -> None:
    arrays = lantern.golden
    tokens = lantern.golden["decode_tokens"]
    steps = [lantern.feed(tokens[:, k : k + 1]) for k in range(tokens.shape[1])]
    assert_close(np.concatenate([out["hidden_states"] for out in steps], 1), arrays["decode_hidden"])
    assert_close(np.concatenate([out["logits"] for out in steps], 1), arrays["decode_logits"])
    tree = {"visible": arrays["tree_mask"] > 0, "positions": arrays["tree_position_ids"]}
    out = lantern.feed(arrays["tree_tokens"], **tree)
    assert_close(out["hidden_states"], arrays["tree_hidden"])
    assert_close(out["logits"], arrays["tree_logits"])
    assert_close(guide(out["logits"], 4.0), arrays["tree_logits_cfg4"], GUIDED_TOLERANCE)


def test_a_tree_that_reaches_past_the_last_cell_is_reproduced(lantern: Target) -> None:
    arrays = lantern.golden
    positions = lantern.golden["late_tree_position_ids"]
    assert positions.max() >= lantern.prefix.shape[1] + read_manifest(lantern.bundle).grid_rows ** 2
    lantern.feed(arrays["late_tokens"])
    out = lantern.feed(arrays["tree_tokens"], visible=arrays["tree_mask"] > 0, positions=positions)
    assert_close(out["hidden_states"], arrays["late_tree_hidden"])
    assert_close(guide(out["logits"], 4.0), arrays["late_tree_logits_cfg4"], GUIDED_TOLERANCE)


def test_the_official_file_of_the_same_weights_gives_the_same_graphs_but_another_filter_order(
    lantern_t2i_bundle: Path, t2i_bundle: Path
) -> None:
    ours, official = (read_manifest(bundle) for bundle in (lantern_t2i_bundle, t2i_bundle))
    differing = {"name", "files", "provenance", "sampling"}
    assert ours.model_dump(exclude=differing) == official.model_dump(exclude=differing)
    for role in ("target", "condition", "code_embeddings"):
        assert ours.files[role].sha256 == official.files[role].sha256, role
    assert [source.role for source in ours.provenance.sources] == ["target_config", "target", "vq"]
    assert (ours.sampling.filter_order, official.sampling.filter_order) == ("top-p, top-k", "top-k, top-p")
    assert ours.sampling.model_copy(update={"filter_order": "top-k, top-p"}) == official.sampling


# ---------------------------------------------------------------- the drafter


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return load_golden("lantern-drafter-llamagen")


def slot_inputs(arrays: Arrays, start: int, end: int) -> Arrays:
    """Return the drafter's inputs of slots: slot p reads token p + 1 and hidden state p."""
    return {
        "input_ids": arrays["token_ids"][:, start + 1 : end + 1],
        "target_hidden": arrays["target_hidden"][:, start:end],
    }


def test_a_plain_forward_of_the_drafter_is_reproduced(t2i_drafter_bundle: Path, arrays: Arrays) -> None:
    run = GraphRun(t2i_drafter_bundle, "drafter", 2)
    length = int(arrays["fwd_len"])
    out = run.step(**slot_inputs(arrays, 0, length))
    assert_close(out["hidden_states"], arrays["fwd_hidden"])
    assert_close(out["logits"], arrays["fwd_logits"])
    assert_close(run.past["0.key"].transpose(1, 2, 0, 3), arrays["fwd_keys"])
    assert_close(run.past["0.value"].transpose(1, 2, 0, 3), arrays["fwd_values"])
    more = run.step(**slot_inputs(arrays, length, length + 4))
    assert_close(more["hidden_states"], arrays["fwd2_hidden"])


def test_the_drafters_cache_may_be_filled_in_pieces(t2i_drafter_bundle: Path, arrays: Arrays) -> None:
    run = GraphRun(t2i_drafter_bundle, "drafter", 2)
    length = int(arrays["fwd_len"])
    out = [run.step(**slot_inputs(arrays, start, min(start + 5, length))) for start in range(0, length, 5)]
    assert_close(np.concatenate([output["hidden_states"] for output in out], 1), arrays["fwd_hidden"])


def test_the_target_graph_outputs_the_hidden_states_that_the_drafter_was_recorded_with(
    t2i_drafter_bundle: Path, arrays: Arrays
) -> None:
    prefix = condition(t2i_drafter_bundle, caption_embeds=arrays["caption_emb"], caption_mask=arrays["emb_mask"])
    codes = np.load(t2i_drafter_bundle / "code_embeddings.npy")[arrays["token_ids"][:, prefix.shape[1] :]]
    is_real_token = np.pad(np.tile(arrays["emb_mask"], (2, 1)) > 0, ((0, 0), (0, codes.shape[1])), constant_values=True)
    out = GraphRun(t2i_drafter_bundle, rows=2).step(
        visible(is_real_token, True), input_embeds=np.concatenate([prefix, codes], 1)
    )
    assert_close(out["hidden_states"], arrays["target_hidden"])


# ---------------------------------------------------------------- the image tokenizer


@pytest.fixture(scope="module")
def tokenizer(c2i_bundle: Path) -> tuple[Path, Arrays]:
    return c2i_bundle, load_golden("llamagen-vq")


class TestImageTokenizer(ImageTokenizerGolden):
    pass
