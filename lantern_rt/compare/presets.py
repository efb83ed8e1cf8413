"""Which methods stand for the qualities of a bundle, by what an evaluation measured."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..bundle.manifest import Manifest, Preset, PresetFigures
from ..methods import MethodConfig, Quality
from ..requests import resolve_settings

ROW_WINDOWS = (8, 6, 4, 3)  # sixteenths of the grid's columns
LAMBDAS = (1.5, 2, 3)


class Limit(NamedTuple):
    """What a quality may give away; whole 95 % intervals of the differences to plain decoding have to keep to it.

    excess_nll: nats per token to either side: tokens more likely than the target's own are a departure, too.
    agreement: of 1, downwards.
    """

    excess_nll: float
    agreement: float


LIMITS: dict[Quality, Limit] = {"balanced": Limit(0.04, 0.02), "fast": Limit(0.12, 0.03)}


def candidate_methods(manifest: Manifest) -> list[str]:
    """Method strings of relaxed methods that any host can run fast: windows and rows, without a drafter's cost."""
    windows = dict.fromkeys(max(1, manifest.grid_columns * share // 16) for share in ROW_WINDOWS)
    relaxed = [f"sjd:window=7:lambda={bound}" for bound in LAMBDAS] if manifest.neighbors else []
    return [*relaxed, *(f"rows:window={window}:drafts=1" for window in windows)]


def choose_presets(report: Mapping[str, Any], manifest: Manifest) -> dict[Quality, Preset]:
    """For each quality the fastest method of those that keep to its limit; of `strict` the fastest exact one but `ar`.

    Tokens per pass do not tell it: a pass of `rows` has fewer nodes than one of a window, and takes less time.

    Args:
        report: of `evaluate`, drawn with the bundle's own sampling.
        manifest: of the bundle.

    Returns:
        Presets by quality; none where no method keeps to the limit.
    """
    exact = [entry for entry in report["methods"] if entry["exact"] and entry["method"] not in ("ar", "strict")]
    relaxed = [entry for entry in report["methods"] if not entry["exact"] and entry["method"] not in LIMITS]
    candidates: dict[Quality, list[Any]] = {"strict": exact}
    candidates |= {
        name: [one for one in relaxed if keeps_limit(one["figures"], limit)] for name, limit in LIMITS.items()
    }
    presets: dict[Quality, Preset] = {}
    for quality, allowed in candidates.items():
        if allowed:
            best = min(allowed, key=lambda entry: entry["seconds"])
            method = resolve_settings(manifest, {"method": best["method"]}).method
            presets[quality] = _preset(method, best, report["images_per_method"])
    return presets


def keeps_limit(figures: Mapping[str, Any], limit: Limit) -> bool:
    """Whether a method's figures keep to a limit."""
    excess = figures["excess_nll"]["difference_to_ar"]
    if max(-excess["low"], excess["high"]) > limit.excess_nll:
        return False
    return "agreement" not in figures or figures["agreement"]["difference_to_ar"]["low"] >= -limit.agreement


def _preset(method: MethodConfig, entry: Mapping[str, Any], images: int) -> Preset:
    figures = entry["figures"] or {}  # none of an exact method that drew the images of `ar`
    agreement = figures.get("agreement")
    measured = PresetFigures(
        tokens_per_pass=entry["tokens_per_forward_pass"],
        excess_nll=figures["excess_nll"]["difference_to_ar"]["value"] if figures else 0.0,
        agreement=None if agreement is None else 100 * agreement["difference_to_ar"]["value"],
        images=images,
        date=datetime.date.today().isoformat(),
    )
    return Preset.model_validate({"method": method, "figures": measured})
