"""Races of method `auto`, run to their end on prompts instead of on a user's requests."""

from __future__ import annotations

import time
from contextlib import closing
from itertools import count, takewhile
from typing import Any, NamedTuple

from ..auto.memory import images_together
from ..auto.race import ENOUGH_PASSES, ENOUGH_TURNS, TURN_PASSES, Race
from ..auto.store import read_tuning
from ..engines.contracts import Progress
from ..methods import Quality
from ..pipeline import Pipeline
from ..requests import resolve_settings
from .turns import Prompts


class RaceResult(NamedTuple):
    """How a race of a quality ended.

    quality: of the bundle. images: that share passes. method: the fastest one's method string. rivals: how many other
    settings draw the same pictures. speed_up: over the baseline of the race; None where there is nothing to race. date:
    when the winner was stored, ISO 8601; None where none is. provisional: why it may not be the fastest; None where it
    is. drawn: images that were begun for it now.
    """

    quality: Quality
    images: int
    method: str
    rivals: int
    speed_up: float | None
    date: str | None
    provisional: str | None
    drawn: int


def tune(
    pipeline: Pipeline, prompts: Prompts, batch: int, temperature: float | None, seconds: float, show: Progress
) -> list[RaceResult]:
    """Draw prompts until the race of every quality is decided; winners are stored as every race's are.

    Args:
        pipeline: whose host is tuned for.
        prompts: to draw.
        batch: images decoded together.
        temperature: 0 is greedy, None the bundle's.
        seconds: that this may take, in equal shares; a race that is not decided by then goes on another time.
        show: takes progress.
    """
    end = time.monotonic() + seconds
    qualities: list[Quality] = ["strict", *pipeline.bundle.manifest.presets]
    results = []
    for number, quality in enumerate(qualities):
        now = time.monotonic()
        share = (end - now) / (len(qualities) - number)
        results.append(run_race(pipeline, prompts, batch, quality, temperature, now + share, show))
    return results


def run_race(
    pipeline: Pipeline,
    prompts: Prompts,
    batch: int,
    quality: Quality,
    temperature: float | None,
    end: float,
    show: Progress,
) -> RaceResult:
    """Draw prompts until the race of one quality is decided, or until `end`; arguments as those of `tune`."""
    options: dict[str, Any] = {"method": "auto", "quality": quality, "temperature": temperature}
    manifest = pipeline.bundle.manifest
    settings = resolve_settings(manifest, options)
    images = min(batch, images_together(manifest, settings, pipeline.engines.most_rows))
    chooser = pipeline.chooser
    for call in count():
        race = chooser.race(images, settings, whole=images > 1)
        if race.decided or time.monotonic() >= end:
            break
        show(f"{quality}: turns", *_progress(race))
        with closing(pipeline.stream(**prompts.request(call, images), **options)) as steps:
            for _ in takewhile(lambda _: time.monotonic() < end, steps):
                pass
    provisional = "busy host" if race.disturbed else None
    if not race.decided:
        provisional = "time is up"
        race.settle(race.leader)
    choice = read_tuning(pipeline.bundle.digest).choices.get(str(chooser.key(images, settings)))
    rivals = len(race.methods) - 1
    return RaceResult(
        quality,
        images,
        str(race.method),
        rivals,
        (choice.speed_up if choice else race.speed_up) if rivals else None,
        choice.date if choice else None,
        provisional,
        call * images,
    )


def _progress(race: Race) -> tuple[int, int]:
    enough = ENOUGH_TURNS if race.whole else max(ENOUGH_TURNS, -(-ENOUGH_PASSES // TURN_PASSES))
    return sum(min(len(turns), enough) for turns in race.turns.values()), enough * len(race.methods)
