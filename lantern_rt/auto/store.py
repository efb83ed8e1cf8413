"""What races found on this host, kept between runs: one JSON file per bundle in the user's cache folder.

A file that cannot be read counts as none, and a warning says so: races can always be run again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ..errors import LanternError, OutputError
from ..inputs import read_plain_file, reading
from ..methods import Config, Method, Quality
from ..output.files import cache_folder, replace_file
from .race import Record

FILE_LIMIT = 1 << 22  # bytes
_log = logging.getLogger(__name__)


class TuningKey(Config):
    """What a race holds for.

    backend: what runs the graphs. threads: of the engines. images: that share passes. greedy: whether the most probable
    token is always taken. quality: of the bundle's presets.
    """

    backend: str
    threads: int
    images: int
    greedy: bool
    quality: Quality

    def __str__(self) -> str:
        host = f"{self.backend}, {self.threads} thread{'s' * (self.threads > 1)}"
        sampling = "greedy" if self.greedy else "sampling"
        return f"{host}, {self.images} image{'s' * (self.images > 1)} at a time, {sampling}, {self.quality}"


class Choice(Config):
    """The winner of a race.

    speed_up: over the race's baseline, tokens per second. date: ISO 8601.
    """

    method: Method
    speed_up: Annotated[float, Field(gt=0)] = 1.0
    date: Annotated[str, Field(max_length=20)] = ""


class Tuning(Config):
    """All that races of one bundle found on this host: winners, and turns of those that are not decided, by key."""

    bundle_digest: str
    choices: Mapping[str, Choice] = Field(default_factory=dict)
    races: Mapping[str, tuple[Record, ...]] = Field(default_factory=dict)


def read_tuning(digest: str) -> Tuning:
    """What is stored of a bundle by its digest; nothing, and a warning, where the file is damaged."""
    nothing = Tuning(bundle_digest=digest)
    try:
        path = tuning_path(digest)
        with reading(path, "measurements of this host", OutputError, "they are ignored"):
            tuning = Tuning.model_validate_json(read_plain_file(path, FILE_LIMIT))
    except LanternError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            _log.warning("%s", error)
        return nothing
    return tuning if tuning.bundle_digest == digest else nothing


def write_tuning(tuning: Tuning) -> Path:
    """Store it and return the file.

    Raises:
        OutputError: it cannot be written.
    """
    path = tuning_path(tuning.bundle_digest)
    try:
        replace_file(path, (tuning.model_dump_json(indent=2) + "\n").encode())
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise OutputError(problem, field=str(path), remedy="set LANTERN_RT_CACHE to a folder that can") from error
    return path


def tuning_path(digest: str) -> Path:
    """Where a bundle's measurements are stored."""
    return cache_folder() / "tuning" / f"{digest[:32]}.json"
