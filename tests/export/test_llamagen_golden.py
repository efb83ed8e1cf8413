"""LlamaGen's exported graphs compared with recordings of the published implementation and of LANTERN's classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from goldens import GUIDED_TOLERANCE, Arrays, GraphRunner, assert_close, load_golden, read_manifest
from numpy.typing import NDArray

from lantern_rt import Pipeline
from lantern_rt.export.compare import GraphFileSession

# By condition: inputs of the condition graph, and names of the recorded arrays.
CONDITION_INPUTS = {
    "c2i": {"class_ids": "class_ids"},
    "t2i": {"caption_embeds": "caption_emb", "caption_mask": "emb_mask"},
}


def compute_prefix_embeddings(bundle: Path, **inputs: NDArray[np.generic]) -> NDArray[np.float32]:
    """Return the prefix embeddings `[rows, positions, width]`: all conditional rows, then all unconditional rows."""
    outputs = GraphFileSession(bundle / "condition.onnx").run(inputs)
    return np.concatenate([outputs["prefix_embeds"], outputs["uncond_embeds"]])


class TargetRun:
    def __init__(
        self, bundle: Path, folder: str, lantern: bool = False, guided: bool = True, masked: bool = True
    ) -> None:
        self.bundle = bundle
        self.golden = load_golden(folder)
        inputs = {name: self.golden[array] for name, array in CONDITION_INPUTS[folder[-3:]].items()}
        if not masked:
            inputs["caption_mask"] = np.ones_like(inputs["caption_mask"])
        self.rows_per_image = 2 if guided else 1
        images = len(next(iter(inputs.values())))
        self.prefix = compute_prefix_embeddings(bundle, **inputs)[: self.rows_per_image * images]
        ones = np.ones((images, self.prefix.shape[1]), np.int64)
        is_real_token = np.tile(inputs.get("caption_mask", ones) > 0, (self.rows_per_image, 1))
        self.codes = np.load(bundle / "code_embeddings.npy")
        self.run = GraphRunner(bundle, rows=len(self.prefix))
        self.prefill_output = self.run.step(
            make_prefix_mask(is_real_token, lantern), is_real_token, input_embeds=self.prefix
        )

    def run_tokens(self, tokens: np.ndarray, **options: np.ndarray) -> Arrays:
        return self.run.step(input_embeds=self.codes[np.tile(tokens, (self.rows_per_image, 1))], **options)

    def predict_recorded_tokens(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the logits and hidden states `[rows, tokens, ...]` from which each recorded token is predicted."""
        output = self.run_tokens(self.golden["tokens"][:, :-1])
        logits, hidden = (
            np.concatenate([self.prefill_output[name][:, -1:], output[name]], 1) for name in ("logits", "hidden_states")
        )
        return logits, hidden


def make_prefix_mask(is_real: np.ndarray, lantern: bool) -> np.ndarray:
    """Return the attention mask `[rows, nodes, nodes]` of prefixes."""
    causal = np.tri(is_real.shape[1], dtype=bool)
    if lantern:
        return np.where(is_real[:, :, None], causal & is_real[:, None], causal | is_real[:, None])
    return causal & is_real[:, None] | np.eye(is_real.shape[1], dtype=bool)


def mix_guidance_rows(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    cond, uncond = np.split(logits, 2)
    return uncond + np.float32(4.0) * (cond - uncond)


# ---------------------------------------------------------------- LlamaGen's official checkpoints


@pytest.fixture(scope="module", params=["c2i", "t2i"])
def official_bundle(request: pytest.FixtureRequest) -> tuple[Path, str]:
    return request.getfixturevalue(f"{request.param}_bundle"), f"llamagen-{request.param}"


def test_recorded_tokens_have_the_published_logits(official_bundle: tuple[Path, str]) -> None:
    target = TargetRun(*official_bundle)
    logits, hidden = target.predict_recorded_tokens()
    assert_close(logits, target.golden["tf_logits"])
    assert_close(hidden, target.golden["tf_hidden"])
    assert_close(mix_guidance_rows(logits), target.golden["tf_logits_cfg4"], GUIDED_TOLERANCE)
    assert_close(
        TargetRun(*official_bundle, guided=False).predict_recorded_tokens()[0], target.golden["tf_logits_nocfg"]
    )


def test_an_image_without_guidance_takes_one_batch_row(c2i_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipeline.from_bundle(c2i_bundle, threads=1)
    arrays = load_golden("llamagen-c2i")
    row_counts = []
    run = pipe.engines.target.run
    monkeypatch.setattr(
        pipe.engines.target, "run", lambda batch, cache: row_counts.append(len(batch.positions)) or run(batch, cache)
    )
    result = pipe(class_ids=arrays["class_ids"].tolist(), cfg_scale=1.0, temperature=0, method="ar")
    np.testing.assert_array_equal(np.reshape(result.codes, (3, -1)), arrays["greedy_ids_cfg1"])
    assert set(row_counts) == {len(arrays["class_ids"])}


def test_padding_of_captions_is_masked_and_zeroed_as_published(t2i_bundle: Path) -> None:
    target = TargetRun(t2i_bundle, "llamagen-t2i")
    arrays = target.golden
    assert_close(target.prefill_output["logits"], arrays["prefill_logits"])
    assert_close(target.prefill_output["hidden_states"], arrays["prefill_hidden"])
    assert_close(
        TargetRun(t2i_bundle, "llamagen-t2i", masked=False).predict_recorded_tokens()[0], arrays["tf_logits_nomask"]
    )
    changed_padding = np.where(arrays["emb_mask"][..., None] > 0, arrays["caption_emb"], np.float32(7))
    assert_close(
        compute_prefix_embeddings(t2i_bundle, caption_embeds=changed_padding, caption_mask=arrays["emb_mask"]),
        target.prefix,
        0,
    )


def test_exported_graphs_use_ir_version_10_and_opset_23_at_most(t2i_drafter_bundle: Path) -> None:
    for path in t2i_drafter_bundle.glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        assert model.ir_version <= 10
        assert [(o.domain, o.version <= 23) for o in model.opset_import] == [("", True)]
        onnx.checker.check_model(str(path), full_check=True)


# ---------------------------------------------------------------- LANTERN's checkpoints


@pytest.fixture(params=["c2i", "t2i"])
def lantern_run(request: pytest.FixtureRequest) -> TargetRun:
    bundle = request.getfixturevalue(f"lantern_{request.param}_bundle")
    return TargetRun(bundle, f"lantern-llamagen-hf/{request.param}", lantern=True)


def test_lanterns_prefill_has_the_recorded_outputs_and_cache(lantern_run: TargetRun) -> None:
    assert_close(lantern_run.prefill_output["hidden_states"], lantern_run.golden["prefill_hidden"])
    assert_close(lantern_run.prefill_output["logits"], lantern_run.golden["prefill_logits"])
    for part in ("key", "value"):
        for layer, expected in enumerate(lantern_run.golden[f"prefill_{part}s"]):
            assert_close(lantern_run.run.past[f"{layer}.{part}"].transpose(1, 2, 0, 3), expected)


def test_lanterns_tokens_and_trees_have_the_recorded_outputs(lantern_run: TargetRun) -> None:
    arrays = lantern_run.golden
    tokens = lantern_run.golden["decode_tokens"]
    steps = [lantern_run.run_tokens(tokens[:, k : k + 1]) for k in range(tokens.shape[1])]
    assert_close(np.concatenate([out["hidden_states"] for out in steps], 1), arrays["decode_hidden"])
    assert_close(np.concatenate([out["logits"] for out in steps], 1), arrays["decode_logits"])
    tree = {"visible": arrays["tree_mask"] > 0, "positions": arrays["tree_position_ids"]}
    out = lantern_run.run_tokens(arrays["tree_tokens"], **tree)
    assert_close(out["hidden_states"], arrays["tree_hidden"])
    assert_close(out["logits"], arrays["tree_logits"])
    assert_close(mix_guidance_rows(out["logits"]), arrays["tree_logits_cfg4"], GUIDED_TOLERANCE)


def test_a_tree_past_the_last_cell_has_the_recorded_outputs(lantern_run: TargetRun) -> None:
    arrays = lantern_run.golden
    positions = lantern_run.golden["late_tree_position_ids"]
    assert positions.max() >= lantern_run.prefix.shape[1] + read_manifest(lantern_run.bundle).grid_rows ** 2
    lantern_run.run_tokens(arrays["late_tokens"])
    out = lantern_run.run_tokens(arrays["tree_tokens"], visible=arrays["tree_mask"] > 0, positions=positions)
    assert_close(out["hidden_states"], arrays["late_tree_hidden"])
    assert_close(mix_guidance_rows(out["logits"]), arrays["late_tree_logits_cfg4"], GUIDED_TOLERANCE)


def test_lanterns_and_llamagens_bundles_differ_in_filter_order(lantern_t2i_bundle: Path, t2i_bundle: Path) -> None:
    lantern, official = (read_manifest(bundle) for bundle in (lantern_t2i_bundle, t2i_bundle))
    differing_fields = {"name", "files", "provenance", "sampling"}
    assert lantern.model_dump(exclude=differing_fields) == official.model_dump(exclude=differing_fields)
    for role in ("target", "condition", "code_embeddings"):
        assert lantern.files[role].sha256 == official.files[role].sha256, role
    assert [source.role for source in lantern.provenance.sources] == ["target_config", "target", "vq"]
    assert (lantern.sampling.filter_order, official.sampling.filter_order) == ("top-p, top-k", "top-k, top-p")
    assert lantern.sampling.model_copy(update={"filter_order": "top-k, top-p"}) == official.sampling


# ---------------------------------------------------------------- the drafter


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return load_golden("lantern-drafter-llamagen")


def make_drafter_inputs(arrays: Arrays, start: int, end: int) -> Arrays:
    """Return the drafter's inputs for positions `start` to `end`: token p + 1 and hidden state p at position p."""
    return {
        "input_ids": arrays["token_ids"][:, start + 1 : end + 1],
        "target_hidden": arrays["target_hidden"][:, start:end],
    }


def test_two_drafter_passes_have_the_recorded_outputs(t2i_drafter_bundle: Path, arrays: Arrays) -> None:
    run = GraphRunner(t2i_drafter_bundle, "drafter", 2)
    length = int(arrays["fwd_len"])
    out = run.step(**make_drafter_inputs(arrays, 0, length))
    assert_close(out["hidden_states"], arrays["fwd_hidden"])
    assert_close(out["logits"], arrays["fwd_logits"])
    assert_close(run.past["0.key"].transpose(1, 2, 0, 3), arrays["fwd_keys"])
    assert_close(run.past["0.value"].transpose(1, 2, 0, 3), arrays["fwd_values"])
    next_output = run.step(**make_drafter_inputs(arrays, length, length + 4))
    assert_close(next_output["hidden_states"], arrays["fwd2_hidden"])
