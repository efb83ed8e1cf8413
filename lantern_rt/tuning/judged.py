"""What `lantern-rt eval` found of relaxed methods' images, read again for budgets to decide by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from ..bundle.files import Bundle
from ..checks import short
from ..errors import RequestError
from ..methods import PARAMETERS, MethodConfig, Sjd
from ..planning.acceptance_statistics import Estimate, Judged, drafting_aside
from ..requests import SAMPLING, Settings, resolve_settings
from ..user_files import read_plain_file, reading

EVALUATION_LIMIT = 1 << 24  # bytes
_CURE = "give the eval.json of `lantern-rt eval`"


class _Part(BaseModel):
    """Base of what is read of the file; it holds more."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class _Figure(_Part):
    difference_to_ar: Estimate
    above_ar_interval: bool


class _Figures(_Part):
    excess_nll: _Figure
    agreement: _Figure | None = None
    frechet: _Figure | None = None


class _Compared(_Part):
    settings: dict[str, Any]
    figures: _Figures


class _Evaluation(_Part):
    bundle_digest: str
    images_per_method: int
    methods: list[_Compared]


def read_judged(path: Path, bundle: Bundle, settings: Settings) -> dict[MethodConfig, Judged]:
    """What an evaluation found of `rows`, and of relaxed `sjd` with the widest window that is there, window aside.

    settings: of what is tuned; images must have been drawn with the same sampling. Other methods are left out: what
    they relax depends on their trees.

    Raises: RequestError: it is no evaluation, one of another bundle, or has none of these methods, or of images.
    """
    with reading(path, "an evaluation of this bundle", RequestError, _CURE):
        found = _Evaluation.model_validate(json.loads(read_plain_file(path, EVALUATION_LIMIT)))
        if found.bundle_digest != bundle.digest:
            digests = f"{short(found.bundle_digest[:12])}, expected {bundle.digest[:12]!r}"
            raise RequestError(f"{path}: found images of bundle {digests}; evaluate this one")
        judged = _judged(found, bundle, settings)
    if not judged:
        wanted = "relaxed sjd or rows, drawn with this sampling, with prompt agreement or Frechet distances"
        raise RequestError(f"{path}: found no {wanted}; {_CURE} of such methods")
    return judged


def _judged(found: _Evaluation, bundle: Bundle, settings: Settings) -> dict[MethodConfig, Judged]:
    """Raises: ValueError: settings that are not this bundle's, or figures that cannot be."""
    judged: dict[MethodConfig, Judged] = {}
    for one in found.methods:
        if one.settings.get("method") not in ("sjd", "rows"):
            continue
        try:
            known = ("method", "size", *SAMPLING, *PARAMETERS)
            drawn = resolve_settings(bundle.manifest, {name: one.settings.get(name) for name in known})
        except RequestError as error:
            raise ValueError(error) from error
        method, window, figures = drawn.method, getattr(drawn.method, "window", 0), one.figures
        looked = figures.agreement is not None or figures.frechet is not None
        if method.exact or not looked or (drawn.sampling, drawn.size) != (settings.sampling, settings.size):
            continue
        before = judged.get(drafting_aside(method))
        if before is not None and (before.window or 0) >= window:
            continue
        judged[drafting_aside(method)] = Judged(
            images=found.images_per_method,
            window=window if isinstance(method, Sjd) else None,
            excess_nll=figures.excess_nll.difference_to_ar,
            agreement=None if figures.agreement is None else figures.agreement.difference_to_ar,
            frechet_within=None if figures.frechet is None else not figures.frechet.above_ar_interval,
        )
    return judged
