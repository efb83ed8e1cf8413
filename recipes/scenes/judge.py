"""Judge of scenes: a small network that recognises the sky, the ground and the solids of an image, and counts solids.

The judge's input has 128 x 128 pixels; larger images are averaged down to this size. The judge is trained on rendered
images with noise; half of them are also encoded and decoded by the VQ tokenizer. Measured agreement cannot exceed the
judge's accuracy on images that it was not trained on.

`judge.onnx` beside this file is the graph for `lantern-rt eval scenes --agreement`. Its inputs are images
`[n, 3, 128, 128]` in 0 .. 1 and word ids of captions `[n, length]`. Its output is the agreement `[n]`: the mean
probability that the judge gives to the attributes in the caption, of which the number of solids is one. The graph
itself parses captions, by the templates of `vocabulary.py`. Only this graph stores the judge's weights; training writes
a copy of the graph with other weights.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import Tensor, nn

from .data import render_scenes, sample_scenes
from .vocabulary import COLOURS, GROUNDS, PLACES, SHAPES, SKIES, Scene, find_unnamed_attributes, sample_scene
from .vq import load_vq, to_tensor

JUDGE_FILE = "judge.onnx"
SHIPPED_JUDGE = Path(__file__).with_name(JUDGE_FILE)
SEEN = 128  # height and width of the judge's input in pixels
ABSENT = 0  # colour and shape class of a third of the image without a solid
RATE = 1e-3
MOST_SOLIDS = 3
MIN_GAP = 0.19  # least distance of two solids, as a share of the width; nearer solids hide each other
FRESH_SEED = 910_000  # seed of scenes for measuring accuracy, which no training step uses


class SceneJudge(nn.Module):
    """Network from images `[n, 3, 128, 128]` in [-1, 1] to logits of attributes.

    The outputs are logits of the sky `[n, skies]` and of the ground `[n, grounds]`. For the left, middle and right
    third of the image, they are also logits of a solid's colour `[n, 3, 1 + colours]` and shape `[n, 3, 1 + shapes]`.
    The last are logits of the number of solids `[n, 4]`.
    """

    def __init__(self) -> None:
        super().__init__()

        def make_conv_block(in_channels: int, out_channels: int) -> list[nn.Module]:
            return [
                nn.Conv2d(in_channels, out_channels, 3, stride=2, padding=1),
                nn.BatchNorm2d(out_channels),
                nn.SiLU(),
            ]

        self.body = nn.Sequential(
            *make_conv_block(3, 24), *make_conv_block(24, 48), *make_conv_block(48, 96), *make_conv_block(96, 128)
        )  # output [n, 128, 8, 8]
        self.scene = nn.Linear(128 * 4, len(SKIES) + len(GROUNDS))
        self.place = nn.Sequential(
            nn.Linear(128 * 8 * 4, 192), nn.SiLU(), nn.Linear(192, 2 + len(COLOURS) + len(SHAPES))
        )
        self.count = nn.Sequential(
            nn.Conv2d(128, 24, 1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(24 * 64, 96),
            nn.SiLU(),
            nn.Linear(96, MOST_SOLIDS + 1),
        )

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        maps = self.body(pictures)
        around = self.scene(F.adaptive_avg_pool2d(maps, (4, 1)).flatten(1))
        # The thirds overlap, since a solid may reach into the next third: [n, places, 128, 8, 4].
        thirds = torch.stack([maps[..., i : i + 4] for i in (0, 2, 4)], 1)
        solids = self.place(thirds.flatten(2))
        colours = solids[..., : 1 + len(COLOURS)]
        shapes = solids[..., 1 + len(COLOURS) :]
        return around[:, : len(SKIES)], around[:, len(SKIES) :], colours, shapes, self.count(maps)


@dataclass(frozen=True)
class DetectedScene:
    """Attributes that the judge finds in an image.

    Args:
        sky: one of `SKIES`.
        ground: one of `GROUNDS`.
        solids: colour and shape of each solid, by its third of the image: `left`, `middle` or `right`.
        count: number of solids, 0 .. 3; `solids` has as many as the image should show.
    """

    sky: str
    ground: str
    solids: dict[str, tuple[str, str]]
    count: int


class RatedImage(NamedTuple):
    """What a judge thinks of an image.

    Args:
        probability: probability that the image shows all that its caption names.
        sky: the sky that the judge finds, one of `SKIES`.
        position: the third of the image that most surely shows a solid, one of `PLACES`.
    """

    probability: float
    sky: str
    position: str


def sample_judge_scene(rng: np.random.Generator) -> Scene:
    """Return a random scene; in half of the scenes 0 .. 3 solids, often alike, stand anywhere, as in wrong images."""
    scene = sample_scene(rng)
    if rng.random() < 0.5:
        return scene
    spots: list[float] = []
    for x in rng.uniform(0.14, 0.86, rng.integers(MOST_SOLIDS + 1)):
        if all(abs(x - other) > MIN_GAP for other in spots):
            spots.append(float(x))
    alike = rng.random() < 0.7
    others = (sample_scene(rng).solids[0] for _ in spots)
    solids = (replace(scene.solids[0] if alike else other, size=other.size) for other in others)
    return replace(scene, solids=tuple(replace(s, x=x) for s, x in zip(solids, sorted(spots), strict=True)))


def make_class_labels(scenes: list[Scene]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the class indices that the judge should predict for scenes.

    Returns:
        Five tensors: sky `[n]`, ground `[n]`, colour `[n, 3]`, shape `[n, 3]` and number of solids `[n]`. Colour and
        shape are given for the left, middle and right third of the image; class 0 means no solid.
    """
    colours = np.zeros((len(scenes), 3), np.int64)
    shapes = np.zeros((len(scenes), 3), np.int64)
    for i, scene in enumerate(scenes):
        for solid in scene.solids:
            place = PLACES.index(solid.place)
            colours[i, place] = COLOURS.index(solid.colour) + 1
            shapes[i, place] = SHAPES.index(solid.shape) + 1
    sky = torch.tensor([SKIES.index(scene.sky) for scene in scenes])
    ground = torch.tensor([GROUNDS.index(scene.ground) for scene in scenes])
    count = torch.tensor([len(scene.solids) for scene in scenes])
    return sky, ground, torch.from_numpy(colours), torch.from_numpy(shapes), count


@torch.no_grad()
def judge(model: SceneJudge, pictures: NDArray[np.uint8], num_solids: list[int]) -> list[DetectedScene]:
    """Detect the attributes of uint8 images `[n, size, size, 3]`.

    Args:
        model: judge of scenes.
        num_solids: number of solids that each image should show. The judge returns as many solids, in the thirds of
            the image that show a solid with the highest probability.
    """
    verdicts = []
    sky, ground, colours, shapes, counts = model(_to_judge_input(pictures))
    present = 1 - colours.softmax(-1)[..., ABSENT]
    for i, expected_count in enumerate(num_solids):
        places = sorted(present[i].topk(expected_count).indices.tolist())
        solids_by_place = {
            PLACES[p]: (COLOURS[int(colours[i, p, 1:].argmax())], SHAPES[int(shapes[i, p, 1:].argmax())])
            for p in places
        }
        found_sky = SKIES[int(sky[i].argmax())]
        found_ground = GROUNDS[int(ground[i].argmax())]
        verdicts.append(DetectedScene(found_sky, found_ground, solids_by_place, int(counts[i].argmax())))
    return verdicts


@torch.no_grad()
def rate_images(model: SceneJudge, images: Tensor, scenes: list[Scene], captions: list[str]) -> list[RatedImage]:
    """Rate images `[n, 3, size, size]` in [-1, 1], which should show what their captions name of their scenes."""
    ratings = []
    outputs = [logits.softmax(-1).cpu() for logits in model(F.adaptive_avg_pool2d(images, SEEN))]
    for scene, caption, sky, ground, colours, shapes, count in zip(scenes, captions, *outputs, strict=True):
        unnamed = find_unnamed_attributes(scene, caption)
        present = 1 - colours[:, ABSENT]
        position = int(present.argmax())
        factors = [count[len(scene.solids)]]
        for solid, place in zip(scene.solids, sorted(present.topk(len(scene.solids)).indices.tolist()), strict=True):
            factors.append(colours[place, COLOURS.index(solid.colour) + 1] / present[place])
            factors.append(shapes[place, SHAPES.index(solid.shape) + 1] / (1 - shapes[place, ABSENT]))
        if "sky" not in unnamed:
            factors.append(sky[SKIES.index(scene.sky)])
        if "ground" not in unnamed:
            factors.append(ground[GROUNDS.index(scene.ground)])
        probability = math.prod(map(float, factors))
        if len(scene.solids) == 1 and "position" not in unnamed and PLACES[position] != scene.solids[0].place:
            probability = 0.0
        ratings.append(RatedImage(max(1e-6, probability), SKIES[int(sky.argmax())], PLACES[position]))
    return ratings


def train_judge(
    work_folder: Path, minutes: float, num_scenes: int = 8000, batch: int = 32, new_seed: int | None = None
) -> None:
    """Train the recipe's judge further, write `work_folder/judge.onnx`, and print its accuracy on other scenes.

    Args:
        work_folder: folder with the VQ tokenizer.
        minutes: minutes of training; the learning rate falls to zero over this time.
        num_scenes: number of training scenes.
        batch: number of images per step.
        new_seed: train a judge from new weights of this seed on other scenes, and write `judge-<seed>.onnx`.
    """
    seed = 4 if new_seed is None else new_seed
    torch.manual_seed(seed)
    vq = load_vq(work_folder)
    size = vq.config.image_size
    rng = np.random.default_rng(seed + 77)
    scenes = [sample_judge_scene(rng) for _ in range(num_scenes)]
    parts = []
    for i in range(0, num_scenes, 500):
        rendered = render_scenes(scenes[i : i + 500], size)
        with torch.no_grad():
            if i < num_scenes // 2:  # half of the images, since the judge sees both rendered and decoded images
                rendered = _to_uint8_images(vq.decode(torch.from_numpy(vq.encode(rendered).astype(np.int64))))
            parts.append(_to_uint8_images(_to_judge_input(rendered)))
    pictures = np.concatenate(parts)
    targets = make_class_labels(scenes)
    model = (load_judge() if new_seed is None else SceneJudge()).train()
    optimiser = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.05)
    start = last_print = time.monotonic()
    step = 0
    while (progress := (time.monotonic() - start) / (60 * minutes)) < 1:
        optimiser.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / 50, (1 - progress) / 0.7)
        chosen = rng.integers(0, num_scenes, batch)
        images = to_tensor(pictures[chosen])
        # Random contrast and noise keep the judge from depending on exact pixel values.
        images = images * torch.empty(batch, 1, 1, 1).uniform_(0.92, 1.08) + 0.06 * torch.randn_like(images)
        losses = [
            F.cross_entropy(logits.flatten(0, -2), target[chosen].flatten(), label_smoothing=0.02)
            for logits, target in zip(model(images), targets, strict=True)
        ]
        loss = torch.stack(losses).sum()
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        optimiser.step()
        step += 1
        if time.monotonic() - last_print > 30:
            last_print = time.monotonic()
            print(f"judge {last_print - start:4.0f} s  step {step}  loss {loss.item():.3f}", flush=True)
    for weight in model.parameters():  # the file stores matrices and kernels in float16
        weight.data = weight.data.half().float() if weight.ndim > 1 else weight.data
    model.eval()
    fresh_scenes = sample_scenes(1000, FRESH_SEED)
    accuracy = measure_judge_accuracy(model, fresh_scenes, render_scenes(fresh_scenes, size))
    save_judge(model, work_folder / (JUDGE_FILE if new_seed is None else f"judge-{seed}.onnx"))
    print("judge done: " + "  ".join(f"{name} {value:.3f}" for name, value in accuracy.items()))


def measure_judge_accuracy(model: SceneJudge, scenes: list[Scene], pictures: NDArray[np.uint8]) -> dict[str, float]:
    """Return the share of images, 0 .. 1, for which the judge finds an attribute correctly, by attribute.

    Args:
        model: judge of scenes.
        scenes: scenes that the images show.
    """
    verdicts = [
        verdict
        for i in range(0, len(scenes), 100)
        for verdict in judge(model, pictures[i : i + 100], [len(s.solids) for s in scenes[i : i + 100]])
    ]
    marks = [compare_attributes(scene, verdict) for scene, verdict in zip(scenes, verdicts, strict=True)]
    names = sorted({name for mark in marks for name in mark})
    return {name: float(np.mean([mark[name] for mark in marks if name in mark])) for name in names}


def compare_attributes(scene: Scene, verdict: DetectedScene) -> dict[str, bool]:
    """Return whether each attribute of a scene was detected in its image.

    The attributes are sky, ground and the number of solids; for one solid its position, colour and shape; for two
    solids `pair colours` and `pair shapes`, which count as correct only if both solids are correct.
    """
    marks = {
        "sky": scene.sky == verdict.sky,
        "ground": scene.ground == verdict.ground,
        "count": len(scene.solids) == verdict.count,
    }
    if len(scene.solids) == 1:
        solid = scene.solids[0]
        (place, (colour, shape)), *_ = verdict.solids.items()
        marks |= {"position": place == solid.place, "colour": colour == solid.colour, "shape": shape == solid.shape}
    else:
        expected_solids = [(solid.colour, solid.shape) for solid in scene.solids]
        found_solids = [verdict.solids[place] for place in PLACES if place in verdict.solids]
        marks["pair colours"] = [c for c, _ in expected_solids] == [c for c, _ in found_solids]
        marks["pair shapes"] = [s for _, s in expected_solids] == [s for _, s in found_solids]
    return marks


def load_judge(work_folder: Path | None = None, name: str = JUDGE_FILE) -> SceneJudge:
    """Load the judge of a work folder, or the judge of the recipe if the folder has none."""
    trained = work_folder / name if work_folder else None
    stored = _read_judge_weights(onnx.load(trained if trained and trained.exists() else SHIPPED_JUDGE))
    model = SceneJudge()
    state = model.state_dict()
    arrays = {name: numpy_helper.to_array(stored[name]) for name in state.keys() & stored.keys()}
    for name, array in arrays.items():  # some matmuls of the graph store their matrix transposed
        state[name] = torch.tensor(array if array.shape == state[name].shape else array.T).float()
    model.load_state_dict(state)
    return model.eval()


def save_judge(model: SceneJudge, path: Path) -> None:
    """Write the recipe's judge graph with the weights of `model`; matrices and kernels are stored as float16."""
    graph = onnx.load(SHIPPED_JUDGE)
    state = model.state_dict()
    for name, tensor in _read_judge_weights(graph).items():
        old = numpy_helper.to_array(tensor)
        new = state[name].numpy()
        new = np.ascontiguousarray(new if new.shape == old.shape else new.T, old.dtype)
        tensor.CopyFrom(numpy_helper.from_array(new, tensor.name))
    path.write_bytes(graph.SerializeToString())


def _read_judge_weights(graph: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """Return the weights stored in a judge's graph, by their names in `SceneJudge`."""
    tensors = [tensor for tensor in graph.graph.initializer if tensor.name.startswith("judge.")]
    return {tensor.name.removeprefix("judge.").removesuffix(".half"): tensor for tensor in tensors}


def _to_judge_input(pictures: NDArray[np.uint8]) -> Tensor:
    """Convert uint8 images `[n, size, size, 3]` to the judge's input, float32 `[n, 3, 128, 128]` in [-1, 1]."""
    return F.adaptive_avg_pool2d(to_tensor(pictures), SEEN)


def _to_uint8_images(images: Tensor) -> NDArray[np.uint8]:
    scaled = (images.clamp(-1, 1) + 1) * 127.5
    return scaled.round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
