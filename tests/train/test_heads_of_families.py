"""Test draft heads of every model family: training data of all image sizes, training, and images of exact methods."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from lantern_rt import Pipeline, open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.compare.prompts import Prompts, read_bundle_prompts
from lantern_rt.prepared import load_model
from lantern_rt.runtime.decode import decode
from lantern_rt.runtime.guidance import Guidance
from lantern_rt.runtime.likelihood import compute_sequence_hidden_states, compute_sequence_logits
from lantern_rt.runtime.statistics import EngineTimer

torch = pytest.importorskip("torch")
for library in ("onnx", "safetensors", "tokenizers", "yaml", "transformers"):
    pytest.importorskip(library)

from family_readers import read_glm_image  # noqa: E402

from lantern_rt.export.families import glm_image  # noqa: E402
from lantern_rt.export.models.decoder import EXCLUDED  # noqa: E402
from lantern_rt.export.writer import export_model  # noqa: E402
from lantern_rt.train.drafter.data import FIRST_SEED  # noqa: E402
from lantern_rt.train.drafter.shards import Shard, get_shard_path  # noqa: E402
from lantern_rt.train.drafter.target import read_head_training_target  # noqa: E402

FAMILIES = (
    "t2i",
    "gear",
    "rar",
    "anole",
    "janus",
    "lumina",
    "lumina2",
    "small_glm_image",
    "emu3",
    "simplear",
    "prologue",
)
PROMPTS = ("a red cube", "sand on a cube", "red sand")
IMAGES_PER_SHARD = 24
NUM_IMAGES = 8  # compared with plain decoding
METHODS = ("sjd:window=7", "eagle:tree=chain-3:drafter=heads", "eagle:tree=dynamic-8-3-2:drafter=heads")


class TrainedBundle(NamedTuple):
    bundle: Path
    data: Path
    prompts: Path | None  # None: class ids
    printed: str


@pytest.fixture(scope="session")
def small_glm_image_bundle(export_once: Any) -> Path:
    """Export GLM-Image with small grids of about 16 codes: 4 x 4, 3 x 5 and 6 x 2."""

    def export(output: Path) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(glm_image, "list_image_grids", lambda square: [(2, 2), (3, 5), (5, 2)])
            patch.setattr(glm_image, "_FIRST_SIDE", 4)
            model = read_glm_image(Path(__file__).parent.parent / "data/glm-image", grid=2)
            return export_model(model, output)

    path: Path = export_once("small_glm_image/bundle", export)
    return path


@pytest.fixture(scope="module", params=FAMILIES)
def trained_bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainedBundle:
    folder = tmp_path_factory.mktemp(request.param)
    bundle = Path(shutil.copytree(request.getfixturevalue(f"{request.param}_bundle"), folder / "bundle"))
    manifest = open_bundle(bundle).manifest
    prompts = None if manifest.condition.kind == "class" else folder / "prompts.txt"
    if prompts is not None:
        prompts.write_text("\n".join(PROMPTS))
    if manifest.condition.kind == "embeddings":
        prompts = folder / "prompts.npz"
        shape = (3, manifest.condition.prefix, manifest.condition.caption_dim or 0)
        np.savez(prompts, embeddings=np.random.default_rng(0).standard_normal(shape, np.float32))
    count = 2 * IMAGES_PER_SHARD * len(manifest.all_sizes)
    data = ["data", bundle, "--count", count, "--output", folder / "data", "--threads", 1]
    data += [] if prompts is None else ["--prompts", prompts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lantern_rt.train.drafter.data.IMAGES_PER_SHARD", IMAGES_PER_SHARD)
        assert run_program(["train-drafter", *map(str, data)]) == 0
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lantern_rt.cli.train_drafter.print_text", lambda *lines: printed.extend(lines))
        assert (
            run_program(["train-drafter", "heads", str(bundle), "--data", str(folder / "data"), "--steps", "60"]) == 0
        )
    return TrainedBundle(bundle, folder / "data", prompts, printed[0])


def read_prompts(trained_bundle: TrainedBundle) -> Prompts:
    return read_bundle_prompts(open_bundle(trained_bundle.bundle), trained_bundle.prompts)


def test_trained_heads_increase_the_overlap_with_the_target(trained_bundle: TrainedBundle) -> None:
    uncorrected, corrected, _ = (float(field.split()[-1]) for field in trained_bundle.printed.split(","))
    assert corrected > uncorrected  # overlap with the target's distribution


def test_training_data_have_the_targets_hidden_states(trained_bundle: TrainedBundle) -> None:
    """Compare stored states with forward passes of the target, after accepted codes and after unaccepted codes."""
    with Pipeline.from_bundle(trained_bundle.bundle, threads=1) as pipeline:
        sampling = pipeline.bundle.manifest.sampling.model_copy(update={"repetition_penalty": None})
        layer = read_head_training_target(pipeline.bundle).output_layer
        for number, size in enumerate(pipeline.bundle.manifest.all_sizes):
            shard = Shard(get_shard_path(trained_bundle.data, number))
            source = shard.source
            assert (source.rows, source.columns, source.num_cells) == (size.rows, size.columns, size.codes)
            images = shard.read_images(slice(0, 3))
            request = read_prompts(trained_bundle).request(number, IMAGES_PER_SHARD, FIRST_SEED) | {"size": size.name}
            prompts = list(pipeline.prepare(pipeline.check(**request, method="ar")).prompts())[:3]
            model = load_model(pipeline.bundle, pipeline.engines, [])
            layout = pipeline.bundle.manifest.layout(size)
            guidance = Guidance(sampling, layout)
            cells = range(size.codes)
            rows = range(2 if sampling.uses_guidance else 1)
            for i, (prompt, codes) in enumerate(zip(prompts, images.codes, strict=True)):
                code_ids = codes.astype(np.int64)
                logits = np.concatenate(
                    [*compute_sequence_logits(model, layout, prompt.rows(len(rows)), code_ids[:-1], EngineTimer())], 1
                )
                states = np.stack(
                    [images.states[i, row, images.prefix_lengths[i, row] - 1 :][: len(codes)] for row in rows]
                )
                inputs = layer.inputs(torch.from_numpy(states.astype(np.float32))).numpy()
                state_logits = layer.compute_logits(torch.from_numpy(guidance.mix_logits(inputs, cells))).numpy()
                expected = guidance.mix_logits(logits, cells)
                state_logits[expected < EXCLUDED / 2] = EXCLUDED  # the position excludes these codes
                np.testing.assert_allclose(state_logits, expected, rtol=0, atol=0.1)
                cell = images.unaccepted_cells[i, 0]
                unaccepted_code = images.unaccepted_codes[i, 0]
                drafted = np.append(code_ids[: cell - 1], unaccepted_code)
                for row, pass_states in enumerate(
                    compute_sequence_hidden_states(model, layout, prompt.rows(len(rows)), [drafted])
                ):
                    np.testing.assert_allclose(
                        images.unaccepted_states[i, row, 0], pass_states[-1], rtol=2e-3, atol=5e-3
                    )


def test_methods_with_heads_give_the_images_of_plain_decoding(trained_bundle: TrainedBundle) -> None:
    with Pipeline.from_bundle(trained_bundle.bundle, threads=1) as pipeline:
        assert pipeline.bundle.manifest.drafters[0] == "heads"
        sizes = pipeline.bundle.manifest.all_sizes
        widest, tallest = (max(sizes, key=lambda size, name=name: getattr(size, name)) for name in ("columns", "rows"))
        for size in {size.name: size for size in (sizes[0], widest, tallest)}.values():

            def generate(
                method: str, num_images: int, batch_size: int, size: Any = size
            ) -> tuple[list[list[int]], float]:
                """Return the codes of each image, and the tokens per forward pass."""
                request = pipeline.check(
                    **read_prompts(trained_bundle).request(0, num_images), size=size.name, method=method
                )
                prepared = pipeline.prepare(request)
                model = prepared.model()
                prompts = prepared.prompts()
                seeds = prepared.seeds
                codes: list[list[int]] = [[] for _ in seeds]
                for step in decode(model, prepared.plan, prompts, seeds, batch_size):
                    for part in step.parts:
                        codes[part.sequence] += part.codes.tolist()
                assert step.stats is not None
                return codes, step.stats.tokens_per_forward_pass

            expected, _ = generate("ar", NUM_IMAGES, NUM_IMAGES)
            for method in METHODS:
                codes, tokens_per_pass = generate(method, NUM_IMAGES, 4)
                assert codes == expected
                assert generate(method, 3, 1)[0] == expected[:3]
                assert tokens_per_pass > 1


def test_a_bundle_with_heads_is_verified(trained_bundle: TrainedBundle, program: Any) -> None:
    code, out, err = program("verify", trained_bundle.bundle, "--json")
    assert (code, json.loads(out)["passed"]) == (0, True), err
