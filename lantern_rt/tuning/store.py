"""What was measured on this host, kept between runs: one JSON file per bundle in the user's cache folder.

Does not measure or choose. A file that cannot be read counts as none: it can always be measured again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import OutputError
from .costs import HostCosts, PassCost

Relaxed = Literal["eagle", "lantern", "lantern++"]


class Part(BaseModel):
    """Base of the stored records: immutable, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Situation(Part):
    """What a choice holds for: another backend, thread count, batch or kind of sampling needs its own."""

    backend: str
    threads: int
    images: int
    greedy: bool
    quality: str


class Choice(Part):
    """How to decode, and what was measured when it was chosen.

    tree and the relaxation are None for `ar`. speed_against_ar: images per second over those of `ar`, the median of
    paired runs. tvd_per_code: mean total variation distance given away per code. nll_ratio: negative log-likelihood of
    the codes over that of `ar`'s.
    """

    method: Literal["ar"] | Relaxed
    tree: str | None = None
    neighbors: int | None = None
    delta: float | None = None
    lambda_: float | None = None
    speed_against_ar: Annotated[float, Field(gt=0)] = 1.0
    tokens_per_target_pass: float = 1.0
    tvd_per_code: float = 0.0
    nll_ratio: float = 1.0

    def parameters(self) -> dict[str, str | int | float]:
        """The request parameters that carry it out."""
        names = ("method", "tree", "neighbors", "delta", "lambda_")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Entry(Part):
    """One situation and the choice for it."""

    situation: Situation
    choice: Choice
    version: str
    date: str


class Probe(Part):
    """What a short probe found of this host's costs: `costs.HostCosts` as plain numbers."""

    backend: str
    threads: int
    rows: int
    target: tuple[tuple[int, float], ...]
    drafter: tuple[tuple[int, float], ...]
    step: float
    level: float

    @classmethod
    def of(cls, situation: Situation, rows: int, costs: HostCosts) -> Probe:
        """The record of `costs`."""
        return cls(
            backend=situation.backend,
            threads=situation.threads,
            rows=rows,
            target=tuple(zip(costs.target.nodes, costs.target.seconds, strict=True)),
            drafter=tuple(zip(costs.drafter.nodes, costs.drafter.seconds, strict=True)),
            step=costs.step,
            level=costs.level,
        )

    def costs(self) -> HostCosts:
        """The costs that were recorded."""
        curves = [PassCost(*map(tuple, zip(*points, strict=True))) for points in (self.target, self.drafter)]
        return HostCosts(curves[0], curves[1], self.step, self.level)


class Tuning(Part):
    """All that was measured for one bundle on this host."""

    bundle_digest: str
    entries: tuple[Entry, ...] = ()
    probes: tuple[Probe, ...] = ()

    def probe(self, situation: Situation, rows: int) -> Probe | None:
        """The probe of passes over so many rows."""
        where = (situation.backend, situation.threads, rows)
        return next((one for one in self.probes if (one.backend, one.threads, one.rows) == where), None)

    def find(self, situation: Situation) -> Entry | None:
        """The entry of a situation; of several batch sizes the nearest one."""
        fits = [e for e in self.entries if e.situation.model_copy(update={"images": situation.images}) == situation]
        return min(fits, key=lambda entry: abs(entry.situation.images - situation.images), default=None)

    def with_entry(self, entry: Entry) -> Tuning:
        """The same with this entry in place of an older one."""
        others = [other for other in self.entries if other.situation != entry.situation]
        return self.model_copy(update={"entries": (*others, entry)})


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
