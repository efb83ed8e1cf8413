"""What the image decoder runs on: plugins that compute in the host's memory, in turns with ONNX Runtime's own CPU.

Codes are the same in any case, and pictures must be but for rounding: bfloat16 is several times as fast on processors
with instructions for it, and whether a decoder bears it is found by looking.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ..engines.host import import_onnxruntime
from ..engines.loader import ImageDecoder, image_decoder
from ..engines.ort.providers import DEFAULT_PROVIDER, host_plugins
from ..errors import EngineError
from ..pipeline import Pipeline
from ..planning.intervals import median_interval, time_in_rounds
from ..planning.store import PictureChoice
from ..results import Ints
from ..runtime.engine import Floats

PICTURES = 2  # that differences are of
MOST_DIFFERENCE = 1.0  # mean absolute one of a picture, of 255 levels
GAIN = 1.1  # what is chosen must surely be so much faster: for less, pictures stay those of other hosts


class Decoder(NamedTuple):
    """A provider, seconds of a picture (median), how much faster it was turn by turn, and the worst difference."""

    provider: str
    seconds: float
    speed_ups: list[float]
    difference: float


class Decoders(NamedTuple):
    """choice: None where nothing was compared, or doubts are left, which `doubt` says. missing: not installed here, or
    they do not take the graph."""

    choice: PictureChoice | None
    doubt: str
    compared: list[Decoder]
    missing: list[str]


def compare_decoders(pipeline: Pipeline, codes: Sequence[Ints], seconds: float, deadline: float) -> Decoders:
    """Time decoders of `codes [cells]` for about `seconds`, to the instant `deadline` of `time.monotonic` at most.

    codes: of pictures, perhaps cut off: then the last one is taken for the rest. Nothing is done where no plugin is
    installed.
    """
    bundle, threads = pipeline.bundle, pipeline.engines.picture_threads
    cells = bundle.manifest.codes_per_image
    here, missing = host_plugins(import_onnxruntime())
    drawn = [np.pad(one, (0, cells - len(one)), "edge")[None] for one in codes[:PICTURES] if len(one)]
    decoders: dict[str, ImageDecoder] = {}
    pictures: dict[str, list[Floats]] = {}
    for name in (DEFAULT_PROVIDER, *here) if here and drawn else ():
        if time.monotonic() > deadline:
            break
        try:
            decoders[name] = image_decoder(bundle, name, threads)
            pictures[name] = [levels(decoders[name](one)) for one in drawn]
        except EngineError:
            if name == DEFAULT_PROVIDER:
                raise
            decoders.pop(name, None)
            missing.append(name)
    jobs = [partial(decode, drawn[0]) for decode in decoders.values()]
    times = dict(zip(decoders, time_in_rounds(jobs, seconds, deadline, untimed=1), strict=True)) if jobs[1:] else {}
    compared = [
        Decoder(
            name,
            statistics.median(own),
            [cpu / each for cpu, each in zip(times[DEFAULT_PROVIDER], own, strict=False)],
            max(map(difference, pictures[name], pictures[DEFAULT_PROVIDER])),
        )
        for name, own in times.items()
        if own and name != DEFAULT_PROVIDER
    ]
    choice = choose_decoder(compared, threads)
    unclear = "there was too little time, or the host is too busy; give more --minutes"
    return Decoders(choice, unclear if {*here} - {*missing} and not choice else "", compared, missing)


def choose_decoder(compared: Sequence[Decoder], threads: int) -> PictureChoice | None:
    """The fastest one whose pictures are near enough, if it surely gains enough, or else the CPU's; None if unclear."""
    near = [one for one in compared if one.difference <= MOST_DIFFERENCE]
    today = datetime.date.today().isoformat()
    for one in sorted(near, key=lambda one: one.seconds):
        if median_interval(one.speed_ups)[0] > GAIN:
            gain = statistics.median(one.speed_ups)
            return PictureChoice(
                provider=one.provider, threads=threads, speed_up=gain, difference=one.difference, date=today
            )
    if not compared or any(median_interval(one.speed_ups)[1] > GAIN for one in near):
        return None
    return PictureChoice(provider=DEFAULT_PROVIDER, threads=threads, date=today)


def levels(images: Floats) -> Floats:
    """Decoder output as 0 .. 255, as pictures have it."""
    rounded: Floats = np.rint((np.clip(images, -1, 1) + 1) * 127.5)
    return rounded


def difference(one: Floats, other: Floats) -> float:
    """Mean absolute difference of levels; what is no number differs as far as can be."""
    return float(np.nan_to_num(np.abs(one - other), nan=255.0).mean())
