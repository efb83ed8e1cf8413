"""What methods give with a model: acceptance rates of trees, tokens per forward pass of windows, and their quality.

These belong to the model, not to the host: a bundle may bring them (role `acceptance_statistics`), and `tune` keeps
those that it found. A file says which weights it was measured with; for others it counts as none, since a model that
has been trained further behaves otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..bundle.files import Bundle
from ..bundle.manifest import Manifest
from ..errors import BundleError
from ..methods import Ar, Method, MethodConfig, RowParallel, Sjd
from ..runtime.tree import MOST_LEVELS
from ..user_files import read_plain_file, reading

FORMAT = 4
FILE_LIMIT = 1 << 24  # bytes
Share = Annotated[float, Field(ge=0, le=1)]
Ranks = Annotated[tuple[Share, ...], Field(min_length=1, max_length=35)]  # as many as the name of a tree can have
_UNSAID = {"residual": "aggregated", "anneal": 1.0}  # what relaxation does where nothing is said


class OtherFormatError(BundleError):
    """Acceptance statistics of another version of lantern-rt."""


class Record(BaseModel):
    """Base of stored records: immutable, no unknown fields, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, serialize_by_alias=True)


class Estimate(Record):
    """A figure, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


class Judged(Record):
    """What `lantern-rt eval` found of a method's images, against plain decoding's; `images` of each.

    window: of `sjd`, the widest that it holds for. excess_nll: change, nats a token. agreement: change of prompt
    agreement, of 1; None if nothing judged it. frechet_within: whether the Frechet distance lies within the interval of
    plain decoding's own; None if there were no features.
    """

    images: Annotated[int, Field(ge=1)]
    window: Annotated[int, Field(ge=1, le=128)] | None = None
    excess_nll: Estimate
    agreement: Estimate | None = None
    frechet_within: bool | None = None

    @model_validator(mode="after")
    def _saw_images(self) -> Judged:
        if self.agreement is None and self.frechet_within is None:
            raise ValueError("neither prompt agreement nor a Frechet distance: nothing has looked at the images")
        return self

    def holds_for(self, method: MethodConfig) -> bool:
        """Whether its images were relaxed as much as the method's: wider windows relax more tokens."""
        return not isinstance(method, Sjd) or (self.window is not None and method.window <= self.window)


class Quality(Record):
    """What a method gives away, and how many images say so. It is the same on every host, unlike speed.

    tvd_per_token: mean total variation distance, 0 where none is measured. nll_ratio: how likely the target finds the
    tokens, against those of plain decoding (`tuning.measure.likelihood_ratio`). nll_error: its standard error. judged:
    of other images than these.
    """

    images: Annotated[int, Field(ge=1)]
    tvd_per_token: Annotated[float, Field(ge=0)]
    nll_ratio: Annotated[float, Field(gt=0)]
    nll_error: Annotated[float, Field(ge=0)]
    judged: Judged | None = None


class WindowTokens(Record):
    """Tokens that a target pass gives on average with a window of `sjd`."""

    window: Annotated[int, Field(ge=1, le=128)]
    tokens: Annotated[float, Field(ge=1, le=129)]


class Fronts(Record):
    """Passes of `rows` over some images, each row with so many drafts: tokens that all of them drew, and by their
    number of nodes how many there were."""

    drafts: Annotated[int, Field(ge=0, le=16)]
    tokens: Annotated[int, Field(ge=1, le=1 << 40)]
    passes: Annotated[dict[int, Annotated[int, Field(ge=1)]], Field(min_length=1, max_length=128)]

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a pass drew on average."""
        return self.tokens / sum(self.passes.values())


class MethodStatistics(Quality):
    """One method, and what it gives and costs; its tree, window or drafts count as left open, but for `rows`' window.

    acceptance_rates: `[depth][rank]`, the share of tried tokens that were accepted, for methods with a drafter.
    windows: for `sjd`, ascending. fronts: for `rows`, of each number of drafts.
    """

    method: Method
    greedy: bool
    acceptance_rates: Annotated[tuple[Ranks, ...], Field(max_length=MOST_LEVELS)] = ()
    windows: tuple[WindowTokens, ...] = ()
    fronts: Annotated[tuple[Fronts, ...], Field(max_length=17)] = ()

    @model_validator(mode="after")
    def _fits_its_method(self) -> MethodStatistics:
        if isinstance(self.method, Ar):
            raise ValueError("method ar drafts nothing")
        needed = {Sjd: "windows", RowParallel: "fronts"}.get(type(self.method), "acceptance_rates")
        if [name for name in ("acceptance_rates", "windows", "fronts") if getattr(self, name)] != [needed]:
            raise ValueError(f"method {self.method.method} needs `{needed}`, and nothing else like it")
        if len({len(row) for row in self.acceptance_rates}) > 1:
            raise ValueError("`acceptance_rates` has rows of several lengths")
        if [one.window for one in self.windows] != sorted({one.window for one in self.windows}):
            raise ValueError("`windows` are not ascending")
        return self

    @property
    def key(self) -> tuple[MethodConfig, bool]:
        """Statistics with equal keys are of the same thing."""
        return drafting_aside(self.method), self.greedy


class AcceptanceStatistics(Record):
    """The file of role `acceptance_statistics`; format 2 was measured with other random numbers, format 3 had no drafts
    of rows.

    weights: sha256 of the decoders' weights, by role.
    """

    format: Literal[4]
    weights: dict[str, str]
    entries: tuple[MethodStatistics, ...]

    def fitting(self, manifest: Manifest) -> tuple[MethodStatistics, ...]:
        """Entries that were measured with the weights that the bundle has; `sjd` does not depend on the drafter's."""
        own = weights_of(manifest)
        same = {role for role in own if self.weights.get(role) == own[role]}
        needed = {False: {"target"}, True: {"target", "drafter"}}
        return tuple(entry for entry in self.entries if needed[entry.method.needs_drafter] <= same)


def drafting_aside(method: MethodConfig) -> MethodConfig:
    """The method with its class's own tree or window, if these change no picture: what statistics are kept for.

    What goes without saying is left out, too.
    """
    drafting = {"drafts"} if isinstance(method, RowParallel) else {"tree", "window"} & type(method).model_fields.keys()
    said = {name for name, usual in _UNSAID.items() if getattr(method, name, None) == usual}
    return method.model_copy(update={name: type(method).model_fields[name].default for name in drafting | said})


def weights_of(manifest: Manifest) -> dict[str, str]:
    """Hashes of the files that hold the weights of target and drafter."""
    files = {role: manifest.files.get(f"{role}.data") or manifest.files.get(role) for role in ("target", "drafter")}
    return {role: entry.sha256 for role, entry in files.items() if entry is not None}


def bundle_statistics(bundle: Bundle) -> AcceptanceStatistics | None:
    """The statistics that a bundle brings, None if it has none of this format; errors as `read_statistics` has them."""
    role = "acceptance_statistics"
    if role not in bundle.manifest.files:
        return None
    try:
        return read_statistics(bundle.path(role))
    except OtherFormatError:
        return None


def read_statistics(path: Path) -> AcceptanceStatistics:
    """The statistics in a file.

    Raises: BundleError: it is not what it should be.
    """
    with reading(path, "acceptance statistics", BundleError, "make the bundle again"):
        data = json.loads(read_plain_file(path, FILE_LIMIT))
        found = data.get("format") if isinstance(data, dict) else None
        if isinstance(found, int) and found != FORMAT:
            raise OtherFormatError(
                f"{path}: found acceptance statistics of format {found}, expected {FORMAT}; measure them again with "
                "`lantern-rt tune BUNDLE --acceptance-statistics FILE`, or upgrade lantern-rt"
            )
        return AcceptanceStatistics.model_validate_json(json.dumps(data))


def merge(new: Iterable[MethodStatistics], old: Iterable[MethodStatistics]) -> tuple[MethodStatistics, ...]:
    """An entry for every method: the one that was judged by more images, then that of more images, then the new one."""
    best = {entry.key: entry for entry in new}
    for entry in old:
        if entry.key not in best or _weight(entry) > _weight(best[entry.key]):
            best[entry.key] = entry
    return tuple(best.values())


def _weight(entry: Quality) -> tuple[int, int]:
    return entry.judged.images if entry.judged is not None else 0, entry.images
