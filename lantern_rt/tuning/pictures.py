"""What the image decoder runs on: plugins that compute in the host's memory, in turns with ONNX Runtime's own CPU.

Codes are the same in any case, and pictures must be but for rounding: bfloat16 is several times as fast on processors
with instructions for it, and whether a decoder bears it is found by looking.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..engines.host import import_onnxruntime
from ..engines.loader import image_decoder
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
    here, missing = host_plugins(import_onnxruntime())
    if not here:
        return Decoders(None, "", [], missing)
    decoders = {DEFAULT_PROVIDER: image_decoder(bundle, DEFAULT_PROVIDER, threads)}
    for name in here:
        try:
            decoders[name] = image_decoder(bundle, name, threads)
        except EngineError:
            missing.append(name)
    cells = bundle.manifest.codes_per_image
    drawn = [np.pad(one, (0, cells - len(one)), "edge")[None] for one in codes[:PICTURES] if len(one)]
    worst = dict.fromkeys(decoders, 0.0)
    for one in drawn:
        if time.monotonic() > deadline:
            break
        pictures = {name: levels(decode(one)) for name, decode in decoders.items()}
        for name, picture in pictures.items():
            worst[name] = max(worst[name], difference(picture, pictures[DEFAULT_PROVIDER]))
    jobs = [lambda decode=decode: decode(drawn[0]) for decode in decoders.values()] if drawn else []
    plain, *others = time_in_rounds(jobs, seconds, deadline, untimed=1) if jobs else [[]]
    compared = [
        Decoder(
            name,
            statistics.median(own),
            [cpu / each for cpu, each in zip(plain, own, strict=False)],
            worst[name],
        )
        for name, own in zip(list(decoders)[1:], others, strict=False)
        if own
    ]
    choice = choose_decoder(compared, threads)
    doubt = "" if choice else "there was too little time, or the host is too busy; give more --minutes"
    return Decoders(choice, doubt, compared, missing)


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
