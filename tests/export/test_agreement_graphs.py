"""Tests of the ONNX graph of the scenes judge, which measures how well images agree with their prompts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lantern_rt import open_bundle

torch = pytest.importorskip("torch")

from lantern_rt.compare.image_graph import Preprocessing, PromptAgreementModel  # noqa: E402
from recipes.scenes.data import render_scenes, sample_scenes  # noqa: E402
from recipes.scenes.judge import JUDGE_FILE, SHIPPED_JUDGE, SceneJudge, load_judge, save_judge  # noqa: E402
from recipes.scenes.vocabulary import (  # noqa: E402
    COLOURS,
    GROUND_PHRASES,
    GROUNDS,
    PLACE_PHRASES,
    PLACES,
    SHAPES,
    SKIES,
    SKY_PHRASES,
    Scene,
    Solid,
    write_caption,
)
from recipes.scenes.vq import to_tensor  # noqa: E402

SCENES = sample_scenes(40, seed=915_000)


@pytest.fixture(scope="module")
def scene_images() -> np.ndarray:
    return render_scenes(SCENES)


def open_judge(path: Path) -> PromptAgreementModel:
    return PromptAgreementModel(path, Preprocessing(), open_bundle("scenes"), 1)


@pytest.fixture(scope="module")
def judge() -> PromptAgreementModel:
    return open_judge(SHIPPED_JUDGE)


def test_images_agree_only_with_their_own_captions(judge: PromptAgreementModel, scene_images: np.ndarray) -> None:
    images = [Image.fromarray(pixels) for pixels in scene_images]
    rng = np.random.default_rng(0)
    captions = [write_caption(scene, rng) for scene in SCENES]  # captions omit attributes at random
    matched_agreement = judge(images, captions)
    swapped_agreement = judge(images, captions[1:] + captions[:1])
    assert matched_agreement.min() > 0.9
    assert swapped_agreement.mean() < 0.3
    assert (swapped_agreement < matched_agreement).all()


def test_agreement_is_the_mean_probability_of_named_attributes(
    judge: PromptAgreementModel, scene_images: np.ndarray
) -> None:
    with torch.no_grad():
        sky, ground, colours, shapes, counts = (
            logits.softmax(-1).numpy() for logits in load_judge()(to_tensor(scene_images[:8]))
        )
    for i in (i for i in range(8) if len(SCENES[i].solids) == 1):
        scene = SCENES[i]
        solid = SCENES[i].solids[0]
        sky_probability = sky[i, SKIES.index(scene.sky)]
        ground_probability = ground[i, GROUNDS.index(scene.ground)]
        place = PLACES.index(solid.place)
        colour = colours[i, place, 1 + COLOURS.index(solid.colour)]
        shape = shapes[i, place, 1 + SHAPES.index(solid.shape)]
        count = counts[i, 1]
        ground_phrase = GROUND_PHRASES[scene.ground][1]
        sky_phrase = SKY_PHRASES[scene.sky][2]
        prompts = {
            f"a {solid.shape}": [shape, count],
            f"a {solid.colour} {solid.shape}": [colour, shape, count],
            f"a {solid.colour} {solid.shape} {ground_phrase}": [colour, shape, ground_probability, count],
            f"a {solid.shape} {sky_phrase}": [shape, sky_probability, count],
            f"a {solid.shape} {PLACE_PHRASES[solid.place][1]}": [shape, 1 - colours[i, place, 0], count],
        }
        agreement = judge([Image.fromarray(scene_images[i])] * len(prompts), list(prompts))
        assert agreement == pytest.approx([np.mean(values) for values in prompts.values()], abs=1e-4)


def test_a_wrong_place_or_a_missing_solid_lowers_the_agreement(judge: PromptAgreementModel) -> None:
    scene = Scene("night", "sand", (Solid("cube", "green", "large", "matte", 0.26),), 3)
    image = Image.fromarray(render_scenes([scene])[0])
    prompts = ["a green cube", "a green cube on the left", "a green cube on the right", "a green cube and a green cube"]
    without_place, at_right_place, at_wrong_place, counted_twice = judge([image] * 4, prompts)
    assert without_place > 0.9
    assert at_right_place > 0.9
    assert at_wrong_place == pytest.approx(without_place * 3 / 4, abs=0.02)  # three of four attributes agree
    assert counted_twice == pytest.approx(without_place * 2 / 5, abs=0.02)  # colour and shape of one of two cubes


def test_a_solid_too_many_lowers_the_agreement(judge: PromptAgreementModel) -> None:
    solids = tuple(Solid("cone", "green", "large", "matte", x) for x in (0.27, 0.73))
    image = Image.fromarray(render_scenes([Scene("night", "sand", solids, 3)])[0])
    one, two = judge([image] * 2, ["a green cone", "a green cone and a green cone"])
    assert two > 0.9
    assert one == pytest.approx(two * 2 / 3, abs=0.02)  # two of three attributes agree


def test_captions_of_two_solids_agree_only_with_the_right_scene(judge: PromptAgreementModel) -> None:
    solids = Solid("cube", "green", "large", "matte", 0.27), Solid("sphere", "red", "large", "matte", 0.73)
    image = Image.fromarray(render_scenes([Scene("clear", "sand", solids, 3)])[0])
    true_captions = [
        "a green cube left of a red ball",
        "a red ball right of a green cube",
        "a red ball and a green cube",
    ]
    assert judge([image] * 3, true_captions).min() > 0.9
    false_captions = ["a red ball left of a green cube", "a red cube left of a green ball"]
    swapped_places_agreement, swapped_colours_agreement = judge([image] * 2, false_captions)
    assert swapped_places_agreement == pytest.approx(5 / 6, abs=0.05)  # five of six attributes agree
    assert swapped_colours_agreement < 0.7


def test_a_saved_judge_gives_the_same_agreement(
    judge: PromptAgreementModel, scene_images: np.ndarray, tmp_path: Path
) -> None:
    images = [Image.fromarray(pixels) for pixels in scene_images[:4]]
    captions = ["a cube on sand"] * 4
    shipped_judge = load_judge()
    save_judge(shipped_judge, tmp_path / JUDGE_FILE)
    saved_agreement = open_judge(tmp_path / JUDGE_FILE)(images, captions)
    np.testing.assert_array_equal(saved_agreement, judge(images, captions))
    torch.manual_seed(0)
    new_judge = SceneJudge()
    save_judge(new_judge, tmp_path / JUDGE_FILE)
    for name, weight in load_judge(tmp_path).state_dict().items():
        new_weight = new_judge.state_dict()[name].float()
        torch.testing.assert_close(weight.float(), new_weight.half().float() if weight.ndim > 1 else new_weight)
    assert (open_judge(tmp_path / JUDGE_FILE)(images, captions) != saved_agreement).all()
