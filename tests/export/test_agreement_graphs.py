"""Graphs for prompt agreement: the scenes judge, and CLIP exported as the documentation says."""

from __future__ import annotations

import warnings
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
    own, others = judged(images, captions), judged(images, captions[1:] + captions[:1])
    assert own.min() > 0.9
    assert others.mean() < 0.3
    assert (others < own).all()


def test_the_judges_graph_gives_the_mean_of_the_judges_probabilities(judged: Agreement, pictures: np.ndarray) -> None:
    with torch.no_grad():
        sky, ground, colours, shapes = (logits.softmax(-1).numpy() for logits in load_judge()(to_tensor(pictures[:8])))
    for i in (i for i in range(8) if len(SCENES[i].solids) == 1):
        scene, solid = SCENES[i], SCENES[i].solids[0]
        of_sky, of_ground = sky[i, SKIES.index(scene.sky)], ground[i, GROUNDS.index(scene.ground)]
        place = PLACES.index(solid.place)
        colour = colours[i, place, 1 + COLOURS.index(solid.colour)]
        shape = shapes[i, place, 1 + SHAPES.index(solid.shape)]
        where, when = GROUND_PHRASES[scene.ground][1], SKY_PHRASES[scene.sky][2]
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
    images, captions = [Image.fromarray(picture) for picture in pictures[:4]], ["a cube on sand"] * 4
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


# ---------------------------------------------------------------- CLIP


def test_clip_exported_as_documented_gives_the_cosine_of_both_encoders(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<pad>", "<start>", "<end>", "a", "red", "cube"]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    clip = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**sizes, **ends, "vocab_size": len(words), "max_position_embeddings": 8},
            vision_config={**sizes, "image_size": 32, "patch_size": 16},
            projection_dim=8,
        )
    ).eval()

    class Score(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = clip

        def forward(self, images: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            found = self.model(input_ids=ids, pixel_values=images)
            return 100 * (found.image_embeds * found.text_embeds).sum(-1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Score().eval(),
            (torch.zeros(2, 3, 32, 32), torch.ones(2, 5, dtype=torch.int64)),
            tmp_path / "clip.onnx",
            input_names=["images", "ids"],
            dynamic_axes={"images": {0: "n"}, "ids": {0: "n", 1: "length"}},
            dynamo=False,
        )
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.post_processor = tokenizers.processors.TemplateProcessing(
        "<start> $A <end>", None, [("<start>", 1), ("<end>", 2)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    half = (0.5, 0.5, 0.5)
    agreement = Agreement(
        tmp_path / "clip.onnx", Preprocessing(image_mean=half, image_std=half), open_bundle("scenes"), 1
    )
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    prompts = ["a red cube", "cube", "red cube"]
    found = agreement([Image.fromarray(picture) for picture in pixels], prompts)
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([[1, *(words.index(word) for word in prompt.split()), 2]])
        with torch.no_grad():
            expected = clip(input_ids=ids, pixel_values=to_tensor(pixels[i : i + 1]))
        cosine = torch.nn.functional.cosine_similarity(expected.image_embeds, expected.text_embeds)
        assert found[i] == pytest.approx(100 * cosine.item(), abs=1e-3)
