"""What was measured on this host, kept between runs: one JSON file per bundle in the user's cache folder.

Does not measure or choose. A file that cannot be read counts as none: it can always be measured again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from ..errors import OutputError
from ..methods import Method
from .acceptance_statistics import MethodStatistics, Record, merge
from .costs import HostCosts, PassCost


class Situation(Record):
    """What a choice holds for: another backend, thread count, batch or kind of sampling needs its own."""

    backend: str
    threads: int
    images: int
    greedy: bool
    quality: str


class Choice(Record):
    """How to decode, and what was measured or predicted when it was chosen.

    speed_up: images per second over those of `ar`, the median of paired runs. tvd_per_token: mean total variation
    distance given away per token. nll_ratio: `tuning.measure.likelihood_ratio`, how likely the target finds the tokens.
    """

    method: Method
    speed_up: Annotated[float, Field(gt=0)] = 1.0
    tokens_per_forward_pass: float = 1.0
    tvd_per_token: float = 0.0
    nll_ratio: float = 1.0


class Entry(Record):
    """One situation and the choice for it."""

    situation: Situation
    choice: Choice
    version: str
    date: str


class Probe(Record):
    """What a short probe found of this host's costs: `costs.HostCosts` as plain numbers; `drafter` may be empty."""

    backend: str
    threads: int
    rows: int
    target: Annotated[tuple[tuple[int, float], ...], Field(min_length=1)]
    drafter: tuple[tuple[int, float], ...]
    step: float
    level: float
    redraft: float

    @classmethod
    def of(cls, situation: Situation, rows: int, costs: HostCosts) -> Probe:
        """The record of `costs`."""
        drafter = costs.drafter
        return cls(
            backend=situation.backend,
            threads=situation.threads,
            rows=rows,
            target=tuple(zip(costs.target.nodes, costs.target.seconds, strict=True)),
            drafter=tuple(zip(drafter.nodes, drafter.seconds, strict=True)) if drafter else (),
            step=costs.step,
            level=costs.level,
            redraft=costs.redraft,
        )

    def costs(self) -> HostCosts:
        """The costs that were recorded."""
        target, drafter = (
            PassCost(*map(tuple, zip(*points, strict=True))) if points else None
            for points in (self.target, self.drafter)
        )
        assert target is not None
        return HostCosts(target, drafter, self.step, self.level, self.redraft)


class Tuning(Record):
    """All that was measured for one bundle on this host; `statistics` would hold on any other."""

    bundle_digest: str
    entries: tuple[Entry, ...] = ()
    statistics: tuple[MethodStatistics, ...] = ()
    probes: tuple[Probe, ...] = ()

    def probe(self, situation: Situation, rows: int) -> Probe | None:
        """The probe of passes over so many rows."""
        where = (situation.backend, situation.threads, rows)
        return next((one for one in self.probes if (one.backend, one.threads, one.rows) == where), None)

    def find(self, situation: Situation) -> Entry | None:
        """The entry of a situation. Another number of images has other costs, so its choice does not count."""
        return next((entry for entry in self.entries if entry.situation == situation), None)

    def with_entry(self, entry: Entry) -> Tuning:
        """The same with this entry in place of an older one."""
        others = [other for other in self.entries if other.situation != entry.situation]
        return self.model_copy(update={"entries": (*others, entry)})

    def with_statistics(self, statistics: tuple[MethodStatistics, ...]) -> Tuning:
        """The same with these added; of a method that has some, those of more images stay."""
        return self.model_copy(update={"statistics": merge(statistics, self.statistics)})


def cache_folder() -> Path:
    """Where this user's measurements lie; `LANTERN_RT_CACHE` overrules the system's custom."""
    if own := os.environ.get("LANTERN_RT_CACHE"):
        return Path(own)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "lantern-rt"


def read_tuning(digest: str) -> Tuning:
    """What is known of a bundle by its digest; nothing where nothing readable is stored."""
    try:
        tuning = Tuning.model_validate_json(_path(digest).read_bytes())
    except (OSError, ValidationError, ValueError):
        return Tuning(bundle_digest=digest)
    return tuning if tuning.bundle_digest == digest else Tuning(bundle_digest=digest)


def write_tuning(tuning: Tuning) -> Path:
    """Store and return the file; OutputError if it cannot be written."""
    path = _path(tuning.bundle_digest)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(tuning.model_dump_json(indent=2) + "\n", "utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written ({error.strerror}); set LANTERN_RT_CACHE to a folder that can"
        ) from error
    return path


def _path(digest: str) -> Path:
    return cache_folder() / "tuning" / f"{digest[:32]}.json"
