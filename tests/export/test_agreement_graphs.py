"""The scenes judge as a graph for prompt agreement."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lantern_rt import open_bundle

torch = pytest.importorskip("torch")

from lantern_rt.compare.image_graph import Agreement, Preprocessing  # noqa: E402
from recipes.scenes.data import draw_scenes, render_scenes  # noqa: E402
from recipes.scenes.judge import JUDGE_FILE, SHIPPED_JUDGE, Judge, load_judge, save_judge  # noqa: E402
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
    describe,
)
from recipes.scenes.vq import to_tensor  # noqa: E402

SCENES = draw_scenes(40, seed=915_000)


@pytest.fixture(scope="module")
def pictures() -> np.ndarray:
    return render_scenes(SCENES)


def open_judge(path: Path) -> Agreement:
    """A judge's graph, as `lantern-rt eval scenes --agreement` opens it."""
    return Agreement(path, Preprocessing(), open_bundle("scenes"), 1)


@pytest.fixture(scope="module")
def judged() -> Agreement:
    return open_judge(SHIPPED_JUDGE)


def test_pictures_agree_with_their_own_captions_and_not_with_others(judged: Agreement, pictures: np.ndarray) -> None:
    images = [Image.fromarray(picture) for picture in pictures]
    rng = np.random.default_rng(0)
    captions = [describe(scene, rng) for scene in SCENES]  # attributes left out at random
    own = judged(images, captions)
    others = judged(images, captions[1:] + captions[:1])
    assert own.min() > 0.9
    assert others.mean() < 0.3
    assert (others < own).all()


def test_the_judges_graph_gives_the_mean_of_the_judges_probabilities(judged: Agreement, pictures: np.ndarray) -> None:
    with torch.no_grad():
        sky, ground, colours, shapes = (logits.softmax(-1).numpy() for logits in load_judge()(to_tensor(pictures[:8])))
    for i in (i for i in range(8) if len(SCENES[i].solids) == 1):
        scene = SCENES[i]
        solid = SCENES[i].solids[0]
        of_sky = sky[i, SKIES.index(scene.sky)]
        of_ground = ground[i, GROUNDS.index(scene.ground)]
        place = PLACES.index(solid.place)
        colour = colours[i, place, 1 + COLOURS.index(solid.colour)]
        shape = shapes[i, place, 1 + SHAPES.index(solid.shape)]
        where = GROUND_PHRASES[scene.ground][1]
        when = SKY_PHRASES[scene.sky][2]
        prompts = {
            f"a {solid.shape}": [shape],
            f"a {solid.colour} {solid.shape}": [colour, shape],
            f"a {solid.colour} {solid.shape} {where}": [colour, shape, of_ground],
            f"a {solid.shape} {when}": [shape, of_sky],
            f"a {solid.shape} {PLACE_PHRASES[solid.place][1]}": [shape, 1 - colours[i, place, 0]],
        }
        found = judged([Image.fromarray(pictures[i])] * len(prompts), list(prompts))
        assert found == pytest.approx([np.mean(values) for values in prompts.values()], abs=1e-4)


def test_a_solid_at_another_place_loses_the_place_alone_and_is_not_counted_twice(judged: Agreement) -> None:
    scene = Scene("night", "sand", (Solid("cube", "green", "large", "matte", 0.26),), 3)
    image = Image.fromarray(render_scenes([scene])[0])
    prompts = ["a green cube", "a green cube on the left", "a green cube on the right", "a green cube and a green cube"]
    anywhere, there, elsewhere, twice = judged([image] * 4, prompts)
    assert anywhere > 0.9
    assert there > 0.9
    assert elsewhere == pytest.approx(anywhere * 2 / 3, abs=0.02)
    assert twice == pytest.approx(anywhere / 2, abs=0.02)  # one cube is not two


def test_pairs_are_read_in_the_order_that_the_caption_says(judged: Agreement) -> None:
    solids = Solid("cube", "green", "large", "matte", 0.27), Solid("sphere", "red", "large", "matte", 0.73)
    image = Image.fromarray(render_scenes([Scene("clear", "sand", solids, 3)])[0])
    right = ["a green cube left of a red ball", "a red ball right of a green cube", "a red ball and a green cube"]
    assert judged([image] * 3, right).min() > 0.9
    swapped, mixed = judged([image] * 2, ["a red ball left of a green cube", "a red cube left of a green ball"])
    assert swapped == pytest.approx(0.8, abs=0.05)  # four attributes of five
    assert mixed < 0.65


def test_a_trained_judge_becomes_the_same_graph_with_other_weights(
    judged: Agreement, pictures: np.ndarray, tmp_path: Path
) -> None:
    images = [Image.fromarray(picture) for picture in pictures[:4]]
    captions = ["a cube on sand"] * 4
    shipped = load_judge()
    save_judge(shipped, tmp_path / JUDGE_FILE)
    again = open_judge(tmp_path / JUDGE_FILE)(images, captions)
    np.testing.assert_array_equal(again, judged(images, captions))
    torch.manual_seed(0)
    other = Judge()
    save_judge(other, tmp_path / JUDGE_FILE)
    for name, weight in load_judge(tmp_path).state_dict().items():
        wanted = other.state_dict()[name].float()
        torch.testing.assert_close(weight.float(), wanted.half().float() if weight.ndim > 1 else wanted)
    assert (open_judge(tmp_path / JUDGE_FILE)(images, captions) != again).all()
