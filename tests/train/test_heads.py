"""Test training of draft heads: exported tables agree with the module, and exact methods give the same images."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lantern_rt import BundleError, Pipeline, open_bundle
from lantern_rt.bundle.manifest import DraftHeadsSpec
from lantern_rt.bundle.rewrite import write_draft_heads
from lantern_rt.cli.main import run_program
from lantern_rt.runtime.heads import DraftHeads, draft_head_shapes

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")

from lantern_rt.train.drafter.heads import RANK, UNITS, TrainableDraftHeads, read_head_samples  # noqa: E402
from lantern_rt.train.drafter.shards import ShardFolder  # noqa: E402
from lantern_rt.train.drafter.target import read_head_training_target  # noqa: E402


def test_the_heads_of_131072_codes_take_less_than_100_megabytes() -> None:
    shapes = draft_head_shapes(131_072, 5120, RANK, UNITS)
    assert 2 * sum(math.prod(shape) for shape in shapes.values()) < 100e6


def test_exported_tables_give_the_logits_of_the_trained_module(c2i_bundle: Path, shards: Path) -> None:
    target = read_head_training_target(open_bundle(c2i_bundle))
    data = ShardFolder(shards, target.shard_sources)
    samples = read_head_samples(data, list(range(8)), target.output_layer, 4.0, 4, np.random.default_rng(0), "cpu")
    module = TrainableDraftHeads(target, 0)
    torch.nn.init.normal_(module.correct, generator=torch.Generator().manual_seed(1))
    heads = DraftHeads(**{name: table.astype(np.float32) for name, table in module.export_tables().items()})
    states_after_draft = samples.unaccepted_states.numpy()
    left_tokens = samples.left_tokens.numpy()
    uncorrected = target.output_layer.compute_logits(samples.unaccepted_inputs).numpy()
    changes = zip(
        heads.compute_gates(states_after_draft), samples.unaccepted_tokens.tolist(), left_tokens[:, None], strict=True
    )
    corrections = np.concatenate([heads.compute_logit_correction(*change) for change in changes])
    with torch.no_grad():
        tolerance = {"rtol": 5e-3, "atol": 2e-2}
        np.testing.assert_allclose(uncorrected + corrections, module.correct_logits(samples), **tolerance)
        module_logits = module.predict_logits(samples)
    for i, states in enumerate(np.stack([states.numpy() for states in samples.context_states], 1)):
        logits = heads.predict_logits(left_tokens[[i]], 0, heads.compute_context(states))[0]
        np.testing.assert_allclose(logits, module_logits[i], **tolerance)


def test_trained_heads_leave_exact_images_the_same(
    c2i_bundle: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(c2i_bundle, folder)
    with Pipeline.from_bundle(folder, threads=1) as pipeline:
        expected_codes = pipeline(class_ids=[3, 5], seed=1, method="ar").codes
    assert run_program(["train-drafter", "heads", str(folder), "--data", str(shards), "--steps", "60"]) == 0
    first_line = capsys.readouterr().out.splitlines()[0]
    uncorrected, corrected, _ = (float(field.split()[-1]) for field in first_line.split(","))
    assert corrected > uncorrected  # overlap with the target's distribution
    bundle = open_bundle(folder)
    assert bundle.draft_heads is not None
    assert [*bundle.manifest.presets] == ["strict"]
    with Pipeline.from_bundle(folder, threads=1) as pipeline:
        for method in ("ar", "sjd:window=3", "sjd:window=15", "eagle:tree=chain-3", "eagle:tree=dynamic-8-3-2"):
            np.testing.assert_array_equal(pipeline(class_ids=[3, 5], seed=1, method=method).codes, expected_codes)
        relaxed = {"method": "sjd:window=4:lambda=3"}
        single_codes, batch_codes = (pipeline(class_ids=ids, seed=2, **relaxed).codes[0] for ids in ([5], [5, 3]))
        np.testing.assert_array_equal(single_codes, batch_codes)


def test_new_heads_replace_old_ones_and_damaged_ones_are_rejected(c2i_bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(c2i_bundle, tmp_path / "bundle")
    bundle = open_bundle(tmp_path / "bundle")
    tables = TrainableDraftHeads(read_head_training_target(bundle), 0).export_tables()
    bundle_with_heads = write_draft_heads(bundle, tables)
    damaged = write_draft_heads(
        bundle_with_heads, {**tables, "output_bias": tables["output_bias"] + np.float16(np.inf)}
    )
    assert [*damaged.folder.glob("heads*")] == [damaged.path("heads")]
    with pytest.raises(BundleError, match="NaN or infinity"):
        _ = damaged.draft_heads
    mislabeled = replace(
        damaged, manifest=damaged.manifest.model_copy(update={"heads": DraftHeadsSpec(rank=7, units=96)})
    )
    with pytest.raises(BundleError, match=r"float16 \[.*\]"):
        _ = mislabeled.draft_heads
