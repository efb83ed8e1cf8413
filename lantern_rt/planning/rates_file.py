"""What candidates give, kept as a file: acceptance rates of trees, codes per pass of windows, and their quality.

These belong to the model, not to the host: a bundle may bring them (role `rates`), and `tune` keeps those that it
found. A file says of which weights it is; for others it counts as none, since a model that has been trained further
has other rates.

Does not measure, and does not know costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from ..bundle.files import Bundle
from ..bundle.manifest import Manifest
from ..checks import brief
from ..errors import BundleError
from .candidates import Measured, Quality
from .records import Candidate, Part

FORMAT = 1
Share = Annotated[float, Field(ge=0, le=1)]


class WindowCodes(Part):
    """Codes that a target pass gives on average with a window of `sjd`."""

    window: Annotated[int, Field(ge=1, le=128)]
    codes: Annotated[float, Field(ge=1)]


class RatesEntry(Part):
    """One candidate, and what it gives and costs.

    images: how many of them it was measured on. nll_ratio: `measure.likelihood_ratio`. rates: `[depth][rank]`, for
    methods with a drafter. windows: for `sjd`, ascending.
    """

    candidate: Candidate
    greedy: bool
    images: Annotated[int, Field(ge=1)]
    tvd_per_code: Annotated[float, Field(ge=0)]
    nll_ratio: Annotated[float, Field(gt=0)]
    nll_error: Annotated[float, Field(ge=0)]
    rates: tuple[tuple[Share, ...], ...] = ()
    windows: tuple[WindowCodes, ...] = ()

    @model_validator(mode="after")
    def _fits_its_method(self) -> RatesEntry:
        needed = "windows" if self.candidate.method == "sjd" else "rates"
        if [name for name in ("rates", "windows") if getattr(self, name)] != [needed]:
            raise ValueError(f"method {self.candidate.method} needs `{needed}`, and nothing else like it")
        if len({len(row) for row in self.rates}) > 1:
            raise ValueError("`rates` has rows of several lengths")
        if [one.window for one in self.windows] != sorted({one.window for one in self.windows}):
            raise ValueError("`windows` are not ascending")
        return self

    @property
    def key(self) -> tuple[Candidate, bool]:
        """Entries with the same key are of the same thing."""
        return self.candidate, self.greedy

    @property
    def quality(self) -> Quality:
        """What the candidate gives away."""
        return Quality(self.images, self.tvd_per_code, self.nll_ratio)

    def tree_rates(self) -> NDArray[np.float64]:
        """Acceptance rates `[depth, rank]`; `[0, 0]` for `sjd`."""
        return np.array(self.rates, np.float64).reshape(len(self.rates), -1 if self.rates else 0)

    def window_codes(self) -> dict[int, float]:
        """Codes per pass by window; empty for methods with a drafter."""
        return {one.window: one.codes for one in self.windows}


class Rates(Part):
    """The file of role `rates`. weights: sha256 of the decoders' weights, by role."""

    format: Literal[1]
    weights: dict[str, str]
    entries: tuple[RatesEntry, ...]

    def fitting(self, manifest: Manifest) -> tuple[RatesEntry, ...]:
        """Entries that were measured with the weights that the bundle has; `sjd` does not depend on the drafter's."""
        own = weights_of(manifest)
        same = {role for role in own if self.weights.get(role) == own[role]}
        return tuple(
            entry
            for entry in self.entries
            if "target" in same and ("drafter" in same or entry.candidate.method == "sjd")
        )


def weights_of(manifest: Manifest) -> dict[str, str]:
    """Hashes of the files that hold the weights of target and drafter."""
    files = {role: manifest.files.get(f"{role}.data") or manifest.files.get(role) for role in ("target", "drafter")}
    return {role: entry.sha256 for role, entry in files.items() if entry is not None}


def brought_rates(bundle: Bundle) -> Rates | None:
    """The rates that a bundle brings, None if it has none; errors as `read_rates` has them."""
    return read_rates(bundle.path("rates")) if "rates" in bundle.manifest.files else None


def read_rates(path: Path) -> Rates:
    """The rates in a file; BundleError if it is not what it should be."""
    try:
        return Rates.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"] == ("format",) and isinstance(first["input"], int):
            raise BundleError(
                f"{path}: found rates of format {first['input']}, expected {FORMAT}; "
                "measure them again with `lantern-rt tune BUNDLE --rates FILE`, or upgrade lantern-rt"
            ) from error
        where = ".".join(map(str, first["loc"])) or "the file"
        raise BundleError(_unreadable(path, f"{where}: {first['msg']}")) from error
    except (OSError, ValueError) as error:
        raise BundleError(_unreadable(path, brief(error))) from error


def as_entries(measured: Iterable[Measured], greedy: bool) -> tuple[RatesEntry, ...]:
    """What to store of measured candidates; those whose likelihood was compared on one image count as 100 % unsure."""
    return tuple(
        RatesEntry(
            candidate=one.candidate,
            greedy=greedy,
            images=one.images,
            tvd_per_code=round(one.tvd_per_code, 5),
            nll_ratio=round(one.nll_ratio, 5),
            nll_error=round(one.nll_error, 5) if np.isfinite(one.nll_error) else 1.0,
            rates=tuple(tuple(round(float(rate), 4) for rate in row) for row in one.rates),
            windows=tuple(WindowCodes(window=w, codes=round(codes, 4)) for w, codes in sorted(one.windows.items())),
        )
        for one in measured
    )


def merge(new: Iterable[RatesEntry], old: Iterable[RatesEntry]) -> tuple[RatesEntry, ...]:
    """An entry for every candidate: the one of more images, of as many the new one."""
    best = {entry.key: entry for entry in new}
    for entry in old:
        if entry.key not in best or entry.images > best[entry.key].images:
            best[entry.key] = entry
    return tuple(best.values())


def _unreadable(path: Path, found: str) -> str:
    return f"{path}: found no rates in it ({' '.join(found.split())[:120]}); make the bundle again"
