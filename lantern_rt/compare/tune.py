"""Races of method `auto`, run to their end on prompts instead of on a user's requests."""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Any, NamedTuple

from ..auto.memory import images_together
from ..auto.race import ENOUGH_PASSES, ENOUGH_TURNS, TURN_PASSES, Race
from ..auto.store import read_tuning
from ..methods import Quality
from ..pipeline import Pipeline
from ..requests import resolve_settings
from .turns import Prompts, Show

MAX_CALLS = 200  # of a race: far more than any takes, unless pictures are of so few tokens that no pass can be timed


class RaceResult(NamedTuple):
    """How a race of a quality ended.

    quality: of the bundle. images: that share passes. method: the winner's method string. rivals: how many other
    settings draw the same pictures. speed_up: over the baseline of the race; None where nothing was raced. date: when
    it was decided, ISO 8601. drawn: images that it took now.
    """

    quality: Quality
    images: int
    method: str
    rivals: int
    speed_up: float | None
    date: str | None
    drawn: int


def tune(pipeline: Pipeline, prompts: Prompts, batch: int, temperature: float | None, show: Show) -> list[RaceResult]:
    """Draw prompts until the race of every quality is decided; winners are stored as every race's are.

    Args:
        pipeline: whose host is tuned for.
        prompts: to draw.
        batch: images decoded together.
        temperature: 0 is greedy, None the bundle's.
        show: takes progress.
    """
    qualities: list[Quality] = ["strict", *pipeline.bundle.manifest.presets]
    return [finish_race(pipeline, prompts, batch, quality, temperature, show) for quality in qualities]


def finish_race(
    pipeline: Pipeline, prompts: Prompts, batch: int, quality: Quality, temperature: float | None, show: Show
) -> RaceResult:
    """Draw prompts until the race of one quality is decided; arguments as those of `tune`."""
    options: dict[str, Any] = {"method": "auto", "quality": quality, "temperature": temperature}
    manifest = pipeline.bundle.manifest
    settings = resolve_settings(manifest, options)
    images = min(batch, images_together(manifest, settings, pipeline.engines.most_rows))
    chooser = pipeline.chooser
    for call in count():
        race = chooser.race(images, settings, whole=images > 1)
        if race.decided or call == MAX_CALLS:
            break
        show(f"{quality}: turns", *_progress(race))
        deque(pipeline.stream(**prompts.request(call, images), **options), maxlen=0)
    choice = read_tuning(pipeline.bundle.digest).choices.get(str(chooser.key(images, settings)))
    return RaceResult(
        quality,
        images,
        str(race.method),
        len(race.methods) - 1,
        choice.speed_up if choice else None,
        choice.date if choice else None,
        call * images,
    )


def _progress(race: Race) -> tuple[int, int]:
    """Turns taken, and how many there are at most; slow methods are given up before."""
    enough = ENOUGH_TURNS if race.whole else max(ENOUGH_TURNS, -(-ENOUGH_PASSES // TURN_PASSES))
    return sum(min(len(turns), enough) for turns in race.turns.values()), enough * len(race.methods)
