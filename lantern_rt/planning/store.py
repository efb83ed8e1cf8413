"""What was measured on this host, kept between runs: one JSON file per bundle in the user's cache folder.

A file that cannot be read counts as none, and a warning says so: it can always be measured again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ..engines.host import import_onnxruntime
from ..engines.ort.providers import IMAGE_DECODER, ON_CPU, Providers, find_provider
from ..errors import EngineError, LanternError, OutputError
from ..methods import Method
from ..output.files import cache_folder, replace_file
from ..runtime.noise import FORMAT
from ..user_files import read_plain_file, reading
from .acceptance_statistics import FILE_LIMIT, MethodStatistics, Record
from .costs import HostCosts
from .race import Timed

_log = logging.getLogger(__name__)


class Situation(Record):
    """What a choice holds for: another backend, thread count, batch or kind of sampling needs its own."""

    backend: str
    threads: int
    images: int
    greedy: bool
    quality: str

    def __str__(self) -> str:
        """All of it, as text."""
        host = f"{self.backend}, {self.threads} thread{'s' * (self.threads > 1)}"
        kind = "greedy" if self.greedy else "sampling"
        text = f"{host}, {self.images} image{'s' * (self.images > 1)} at a time, {kind}"
        return f"{text}, {self.quality}" if self.quality else text


class Choice(Record):
    """How to decode, and what was measured or predicted when it was chosen.

    speed_up: images per second over those of `ar`, the median of paired runs; tokens per second if it was found while
    drawing (`race.py`). The others are as in `Quality`.
    """

    method: Method
    speed_up: Annotated[float, Field(gt=0)] = 1.0
    tokens_per_forward_pass: float = 1.0
    tvd_per_token: float = 0.0
    nll_ratio: float = 1.0
    date: Annotated[str, Field(max_length=20)] = ""
    found: Literal["tuned", "while drawing"] = "tuned"


class PictureChoice(Record):
    """What the image decoder runs on, and what was measured when it was chosen.

    speed_up: over ONNX Runtime's CPU provider, the median of turns, with so many threads. difference: of the pictures
    from that one's, the mean absolute one of the worst picture, of 255 levels.
    """

    provider: str
    threads: int
    speed_up: Annotated[float, Field(gt=0)] = 1.0
    difference: Annotated[float, Field(ge=0)] = 0.0
    date: Annotated[str, Field(max_length=20)] = ""

    def __str__(self) -> str:
        """In words."""
        levels = f"pictures differ by {self.difference:.2f} of 255 levels"
        return f"{self.provider}, speed-up {self.speed_up:.2f}, {levels}"


class Tuning(Record):
    """All that was measured for one bundle on this host.

    choices: by situation as text; another number of images has other costs, so its choice does not count. statistics:
    what would hold on any other host. probes: costs by backend, threads and rows. races: those that are not decided, by
    situation as text. picture: what the image decoder runs on. noise: the random numbers that drafts were made with;
    how often they are accepted depends on it.
    """

    bundle_digest: str
    noise: Literal["philox4x64-gumbel-1"] = FORMAT
    choices: Mapping[str, Choice] = Field(default_factory=dict)
    statistics: tuple[MethodStatistics, ...] = ()
    probes: Mapping[str, HostCosts] = Field(default_factory=dict)
    races: Mapping[str, tuple[Timed, ...]] = Field(default_factory=dict)
    picture: PictureChoice | None = None


def read_tuning(digest: str) -> Tuning:
    """What is known of a bundle by its digest; nothing, and a warning, where what is stored is damaged."""
    nothing = Tuning(bundle_digest=digest)
    try:
        path = _path(digest)
        with reading(path, "measurements of this host", OutputError, "they are ignored"):
            tuning = Tuning.model_validate_json(read_plain_file(path, FILE_LIMIT))
    except LanternError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            _log.warning("%s", error)
        return nothing
    current = tuning.bundle_digest == digest and "noise" in tuning.model_fields_set  # older files have none
    return tuning if current else nothing


def tuned_providers(digest: str) -> Providers:
    """What a bundle's graphs run on where nobody says: the CPU, and the image decoder on what was chosen for it.

    A choice that is not installed any more is ignored, and a warning says so.
    """
    chosen = read_tuning(digest).picture
    if chosen is None:
        return ON_CPU
    try:
        find_provider(chosen.provider, import_onnxruntime())
        return Providers.read(f"{IMAGE_DECODER}={chosen.provider}")
    except EngineError as error:
        _log.warning("%s: what is stored for the image decoder is ignored: %s", _path(digest), error)
        return ON_CPU


def ignore_choice(digest: str, situation: Situation, problem: LanternError) -> None:
    """Warn that what is stored for a situation cannot be carried out."""
    _log.warning("%s: what is stored for %s is ignored: %s", _path(digest), situation, problem)


def write_tuning(tuning: Tuning) -> Path:
    """Store and return the file; OutputError if it cannot be written."""
    path = _path(tuning.bundle_digest)
    try:
        replace_file(path, (tuning.model_dump_json(indent=2) + "\n").encode())
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written ({error.strerror}); set LANTERN_RT_CACHE to a folder that can"
        ) from error
    return path


def forget_tuning(digest: str) -> Path | None:
    """Remove what is stored of a bundle: the file, None if there was none; OutputError if it cannot be removed."""
    path = _path(digest)
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OutputError(f"{path}: cannot be removed ({error.strerror}); remove it yourself") from error
    return path


def _path(digest: str) -> Path:
    return cache_folder() / "tuning" / f"{digest[:32]}.json"
