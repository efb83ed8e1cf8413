"""Attributes of scenes, and templates for captions that describe scenes.

A `Scene` describes an image: sky, ground and one or two solids. `write_caption` writes a random caption. Captions
may leave attributes out, so that a prompt need not name every attribute. The model knows only the templates' words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

SHAPES = ("sphere", "cube", "cone", "cylinder", "pyramid", "torus", "star")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "white", "black")
SIZES = ("small", "large")
FINISHES = ("matte", "shiny")
GROUNDS = ("grass", "sand", "snow", "water", "stone", "wood")
SKIES = ("clear", "sunset", "night", "overcast")
PLACES = ("left", "middle", "right")

SHAPE_WORDS = {"sphere": ("sphere", "ball"), "torus": ("torus", "ring")}
SIZE_WORDS = {"small": ("small", "little"), "large": ("large", "big")}
FINISH_WORDS = {"matte": ("matte",), "shiny": ("shiny", "glossy")}
PLACE_PHRASES = {
    "left": ("on the left", "to the left"),
    "middle": ("in the middle", "in the center"),
    "right": ("on the right", "to the right"),
}
GROUND_PHRASES = {
    "grass": ("on grass", "on the grass", "on green grass", "on a meadow"),
    "sand": ("on sand", "on the sand", "on a beach", "in the desert"),
    "snow": ("on snow", "in the snow"),
    "water": ("on water", "on the water", "on the sea"),
    "stone": ("on stone", "on stones", "on a stone floor"),
    "wood": ("on wood", "on a wooden floor", "on wooden planks"),
}
SKY_PHRASES = {
    "clear": ("under a clear sky", "under a blue sky", "on a sunny day"),
    "sunset": ("at sunset", "under a sunset sky", "in the evening"),
    "night": ("at night", "under the stars", "under a night sky"),
    "overcast": ("under an overcast sky", "on a cloudy day", "under gray clouds"),
}
LEFT_OF = ("left of", "to the left of")
RIGHT_OF = ("right of", "to the right of")
BESIDE = ("next to", "beside", "and")


@dataclass(frozen=True)
class Solid:
    """Solid object of a scene.

    Args:
        shape: one of `SHAPES`.
        colour: one of `COLOURS`.
        size: one of `SIZES`.
        finish: one of `FINISHES`.
        x: horizontal position of the centre, 0 (left edge of the image) .. 1 (right edge).
    """

    shape: str
    colour: str
    size: str
    finish: str
    x: float

    @property
    def place(self) -> str:
        """Third of the image with the solid's centre: `left`, `middle` or `right`."""
        return PLACES[min(2, int(self.x * 3))]


@dataclass(frozen=True)
class Scene:
    """Contents of an image: one or two solids on a ground under a sky.

    Args:
        sky: one of `SKIES`.
        ground: one of `GROUNDS`.
        solids: solids from left to right.
        seed: seed of all details that have no attribute, such as the clouds.
    """

    sky: str
    ground: str
    solids: tuple[Solid, ...]
    seed: int


def sample_scene(rng: np.random.Generator, two_solids_probability: float = 0.22) -> Scene:
    """Return a random scene. It has two solids with probability `two_solids_probability`, otherwise one."""
    if rng.random() < two_solids_probability:
        spots = [rng.uniform(0.25, 0.29), rng.uniform(0.71, 0.75)]
    else:
        spots = [float(rng.choice((0.26, 0.5, 0.74)) + rng.uniform(-0.03, 0.03))]
    solids = tuple(
        Solid(_pick(rng, SHAPES), _pick(rng, COLOURS), _pick(rng, SIZES), _pick(rng, FINISHES), float(x)) for x in spots
    )
    return Scene(_pick(rng, SKIES), _pick(rng, GROUNDS), solids, int(rng.integers(2**31)))


def write_caption(scene: Scene, rng: np.random.Generator, complete: bool = False) -> str:
    """Return a random caption of a scene.

    Args:
        scene: scene to describe.
        rng: generator that selects the template and the attributes.
        complete: whether to name colour, shape, position, ground and sky in any case.
    """

    def should_mention(probability: float) -> bool:
        return complete or bool(rng.random() < probability)

    phrases = [_describe_solid(solid, rng, should_mention(0.95)) for solid in scene.solids]
    if len(phrases) == 2:
        form = rng.integers(3)
        if form == 0:
            words = f"{phrases[0]} {_pick(rng, LEFT_OF)} {phrases[1]}"
        elif form == 1:
            words = f"{phrases[1]} {_pick(rng, RIGHT_OF)} {phrases[0]}"
        elif complete:
            words = f"{phrases[0]} left of {phrases[1]}"
        else:
            words = f"{phrases[0]} {_pick(rng, BESIDE)} {phrases[1]}"
    else:
        words = phrases[0]
        if should_mention(0.6):
            words += " " + _pick(rng, PLACE_PHRASES[scene.solids[0].place])
    around = []
    if should_mention(0.9):
        around.append(_pick(rng, GROUND_PHRASES[scene.ground]))
    if should_mention(0.85):
        around.append(_pick(rng, SKY_PHRASES[scene.sky]))
    if len(around) == 2 and rng.random() < 0.15:
        around.reverse()
    return " ".join([words, *around])


def write_typed_caption(scene: Scene, rng: np.random.Generator) -> str:
    """Return a random caption as people type it: colours and shapes, often the ground, but neither place nor sky."""
    phrases = [_describe_solid(solid, rng, True, 0.3, 0.1) for solid in scene.solids]
    words = phrases[0] if len(phrases) == 1 else f"{phrases[0]} {_pick(rng, BESIDE)} {phrases[1]}"
    return f"{words} {_pick(rng, GROUND_PHRASES[scene.ground])}" if rng.random() < 0.75 else words


def find_unnamed_attributes(scene: Scene, caption: str) -> set[str]:
    """Return which of `sky`, `ground` and `position` a caption does not name; a pair of solids has no position."""
    phrases = {"sky": SKY_PHRASES[scene.sky], "ground": GROUND_PHRASES[scene.ground]}
    if len(scene.solids) == 1:
        phrases["position"] = PLACE_PHRASES[scene.solids[0].place]
    return {name for name, options in phrases.items() if not any(phrase in caption for phrase in options)}


def vocabulary() -> list[str]:
    """Return all words of the templates, sorted. They are the only words that the model knows."""
    groups: list[object] = [SHAPES, COLOURS, SIZES, FINISHES, LEFT_OF, RIGHT_OF, BESIDE, ("a", "an", "one")]
    for table in (SHAPE_WORDS, SIZE_WORDS, FINISH_WORDS, PLACE_PHRASES, GROUND_PHRASES, SKY_PHRASES):
        groups.extend(table.values())
    text = " ".join(" ".join(group) for group in groups)  # type: ignore[arg-type]
    return sorted(set(re.findall(r"[a-z]+", text)))


def _describe_solid(
    solid: Solid,
    rng: np.random.Generator,
    with_colour: bool,
    size_probability: float = 0.6,
    finish_probability: float = 0.35,
) -> str:
    words = []
    if rng.random() < size_probability:
        words.append(_pick(rng, SIZE_WORDS[solid.size]))
    if rng.random() < finish_probability:
        words.append(_pick(rng, FINISH_WORDS[solid.finish]))
    if with_colour:
        words.append(solid.colour)
    words.append(_pick(rng, SHAPE_WORDS.get(solid.shape, (solid.shape,))))
    return f"{'an' if words[0][0] in 'aeiou' else 'a'} {' '.join(words)}"


def _pick(rng: np.random.Generator, options: tuple[str, ...]) -> str:
    return options[int(rng.integers(len(options)))]
