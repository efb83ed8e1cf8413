"""Test the training recipe of the embedded bundle: captions, rendered images, restored weights, and the evaluation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.torch import load_file

from lantern_rt import open_bundle
from lantern_rt.bundle.files import EMBEDDED

torch = pytest.importorskip("torch")

from lantern_rt.train.muon import orthogonalise  # noqa: E402
from recipes.scenes.data import render_scenes, sample_scenes  # noqa: E402
from recipes.scenes.evaluate import evaluate_bundle, sample_prompts  # noqa: E402
from recipes.scenes.judge import (  # noqa: E402
    DetectedScene,
    compare_attributes,
    load_judge,
    measure_judge_accuracy,
    rate_images,
)
from recipes.scenes.model import CONFIG, ScenesTarget  # noqa: E402
from recipes.scenes.render import SIZE, render  # noqa: E402
from recipes.scenes.restore import restore_work_folder  # noqa: E402
from recipes.scenes.target import load_target  # noqa: E402
from recipes.scenes.text import SLOTS, UNKNOWN, encode_caption  # noqa: E402
from recipes.scenes.vocabulary import (  # noqa: E402
    Scene,
    Solid,
    sample_scene,
    vocabulary,
    write_caption,
)
from recipes.scenes.vq import to_tensor  # noqa: E402


def test_every_caption_has_known_words_and_is_short_enough() -> None:
    rng = np.random.default_rng(0)
    for _ in range(2000):
        caption = write_caption(sample_scene(rng), rng)
        assert len(caption.split()) <= SLOTS
        assert UNKNOWN not in encode_caption(caption)
        assert set(re.findall("[a-z]+", caption)) <= set(vocabulary())


def test_rendering_a_scene_is_deterministic() -> None:
    scene = Scene("clear", "sand", (Solid("sphere", "red", "large", "matte", 0.26),), 5)
    image = render(scene).astype(np.int64)
    assert (render(scene) == image).all()
    row = 85 * SIZE // 128
    column = round(0.26 * SIZE)
    red, green, blue = image[row, column]
    assert red > 2 * max(green, blue)
    assert (image[row, SIZE // 2 :] == render(Scene("clear", "sand", (), 5))[row, SIZE // 2 :]).all()


def test_folded_code_tables_give_the_training_passs_states() -> None:
    torch.manual_seed(0)
    target = ScenesTarget(torch.nn.functional.normalize(torch.randn(CONFIG.vocab_size, 8), dim=1)).eval()
    decoder, table = target.fold_code_tables()
    caption = torch.from_numpy(encode_caption("a red cube on sand"))[None]
    codes = torch.randint(CONFIG.vocab_size, (1, 40))
    with torch.no_grad():
        training_states = target.compute_hidden_states(target.prefix(caption), codes)
        config = target.config
        past = [torch.zeros(0, 1, config.num_kv_heads, config.head_dim)] * 2 * config.num_layers
        steps = [target.prefix(caption), *(table[codes[:, i : i + 1]] for i in range(39))]
        position = 0
        for i, embeds in enumerate(steps):
            nodes = embeds.shape[1]
            mask = torch.zeros(1, 1, nodes, position + nodes)
            mask[..., position:] = torch.full((nodes, nodes), -1e9).triu(1)
            positions = torch.arange(position, position + nodes)[None]
            _, hidden, *new_kv = decoder(embeds, positions, mask, *past)
            past = [torch.cat(pair) for pair in zip(past, new_kv, strict=True)]
            position += nodes
            assert (hidden[:, -1] - training_states[:, i]).abs().max() < 1e-4


@pytest.fixture(scope="module")
def work_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe") / "work"
    restore_work_folder("scenes", folder)
    return folder


def test_a_restored_work_folder_gives_the_same_weights(
    work_folder: Path, float_scenes_bundle: Path, tmp_path: Path
) -> None:
    embedded_bundle = open_bundle("scenes")
    float_bundle = open_bundle(float_scenes_bundle)
    hashes = [bundle.manifest.files["vq_encoder.data"].sha256 for bundle in (float_bundle, embedded_bundle)]
    assert hashes[0] == hashes[1]
    assert np.load(float_bundle.path("code_embeddings"), mmap_mode="r").dtype == np.float16
    assert float_bundle.manifest.sampling == embedded_bundle.manifest.sampling
    np.testing.assert_array_equal(float_bundle.code_embeddings, embedded_bundle.code_embeddings)
    np.testing.assert_array_equal(float_bundle.neighbor_table[:, :128], embedded_bundle.neighbor_table[:, :128])
    restore_work_folder(float_scenes_bundle, tmp_path / "again")
    folders = work_folder, tmp_path / "again"
    targets = (load_target(folder).state_dict() for folder in folders)
    drafters = (load_file(folder / "drafter" / "model.safetensors") for folder in folders)
    for before, after in (tuple(targets), tuple(drafters)):
        assert before.keys() == after.keys()
        for name, weight in before.items():  # up to float16 rounding of dequantized weights
            torch.testing.assert_close(after[name], weight, rtol=2**-11, atol=2**-22)


def test_every_large_weight_of_a_bundle_is_stored_in_16_bits(float_scenes_bundle: Path) -> None:
    for role in ("target", "drafter", "vq_encoder", "vq_decoder"):
        graph = onnx.load(float_scenes_bundle / f"{role}.onnx", load_external_data=False).graph
        float32_names = [
            tensor.name
            for tensor in graph.initializer
            if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) > 1
        ]
        assert [name for name in float32_names if not name.startswith("rotary.") and "codebook" not in name] == []


def test_muon_updates_have_singular_values_near_one() -> None:
    torch.manual_seed(2)
    for shape, dtype in (((3, 64, 96), torch.float32), ((2, 96, 64), torch.float32), ((3, 64, 96), torch.bfloat16)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape).to(dtype)).float())
        assert values.min() > 0.5
        assert values.max() < 1.4


def test_attributes_are_compared_with_scenes_of_one_and_two_solids() -> None:
    single = Scene("night", "sand", (Solid("cone", "green", "large", "matte", 0.5),), 3)
    marks = compare_attributes(single, DetectedScene("night", "snow", {"middle": ("green", "cube")}, 2))
    expected = {"sky": True, "ground": False, "count": False, "position": True, "colour": True, "shape": False}
    assert marks == expected
    pair = Scene(
        "clear",
        "wood",
        (Solid("cone", "red", "small", "matte", 0.27), Solid("cube", "blue", "small", "matte", 0.73)),
        3,
    )
    marks = compare_attributes(
        pair, DetectedScene("clear", "wood", {"left": ("red", "cone"), "right": ("blue", "star")}, 2)
    )
    assert marks == {"sky": True, "ground": True, "count": True, "pair colours": True, "pair shapes": False}


def test_the_judge_recognizes_attributes_of_rendered_scenes() -> None:
    scenes = sample_scenes(40, seed=915_000)
    accuracy = measure_judge_accuracy(load_judge(), scenes, render_scenes(scenes))
    assert min(accuracy.values()) >= 0.9
    assert accuracy["sky"] == accuracy["ground"] == accuracy["colour"] == 1


def test_the_judge_rates_images_by_what_their_captions_name() -> None:
    scenes, captions = sample_prompts(40)
    images = to_tensor(render_scenes(scenes))
    ratings = rate_images(load_judge(), images, scenes, captions)
    assert np.mean([rating.probability > 0.7 for rating in ratings]) > 0.9
    assert [rating.sky for rating in ratings] == [scene.sky for scene in scenes]
    places = [{solid.place for solid in scene.solids} for scene in scenes]
    assert all(rating.position in found for rating, found in zip(ratings, places, strict=True))
    others = rate_images(load_judge(), images.roll(1, 0), scenes, captions)
    assert np.mean([rating.probability < 0.05 for rating in others]) > 0.9


def test_an_evaluation_reports_methods_judge_and_tokenizer(tmp_path: Path) -> None:
    report = evaluate_bundle(EMBEDDED / "scenes", tmp_path / "work", tmp_path, 2, ["sjd:window=7"], threads=1)
    assert json.loads((tmp_path / "evaluation.json").read_text())["prompts"] == 2
    assert report["judge"]["sky"][0] == report["judge"]["ground"][0] == 1
    assert 20 < report["tokenizer_psnr"] < 40
    (method_report,) = report["methods"].values()
    assert method_report["agreement"].keys() == report["judge"].keys() > {"all", "count", "sky", "ground"}
    assert method_report["spread"].keys() == report["spread"].keys() == {"sky", "place"}
    assert (tmp_path / "methods.jpg").exists()
