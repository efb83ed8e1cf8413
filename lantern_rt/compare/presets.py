"""Choice of the decoding method for each quality (`strict`, `balanced`, `fast`), from the report of an evaluation."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..bundle.manifest import Manifest, Preset, PresetMeasurements
from ..completion import list_supported_methods
from ..methods import MethodConfig, Quality
from ..requests import resolve_settings

ROW_WINDOWS = (8, 6, 4, 3)  # Windows of the method `rows`, in sixteenths of the number of grid columns.
LAMBDAS = (1.5, 2, 3)


class QualityLimit(NamedTuple):
    """Maximum deviation from plain decoding that a quality allows. The 95 % interval must lie within the limit."""

    max_excess_nll: float  # of either sign, in nats per token: tokens that are too likely are a deviation, too
    max_agreement_loss: float  # 0 .. 1


LIMITS: dict[Quality, QualityLimit] = {"balanced": QualityLimit(0.04, 0.02), "fast": QualityLimit(0.12, 0.03)}


def list_candidate_methods(manifest: Manifest) -> list[str]:
    """Return the strings of relaxed methods that may become presets: `sjd` and `rows`, which need no drafter."""
    windows = dict.fromkeys(max(1, manifest.grid_columns * share // 16) for share in ROW_WINDOWS)
    relaxed = [f"sjd:window=7:lambda={bound}" for bound in LAMBDAS]
    return list_supported_methods(manifest, [*relaxed, *(f"rows:window={window}:drafts=1" for window in windows)])


def choose_presets(report: Mapping[str, Any], manifest: Manifest) -> dict[Quality, Preset]:
    """Choose a method for each quality, by the report of an evaluation: the fastest method within the quality's limit.

    For `strict`, this is the fastest exact method except `ar`. Methods are compared by seconds, because the time of a
    forward pass differs between methods. A quality is left out if no method is within its limit.
    """
    exact = [entry for entry in report["methods"] if entry["exact"] and entry["method"] not in ("ar", "strict")]
    relaxed = [entry for entry in report["methods"] if not entry["exact"] and entry["method"] not in LIMITS]
    candidates: dict[Quality, list[Any]] = {"strict": exact}
    candidates |= {
        name: [entry for entry in relaxed if is_within_limit(entry["figures"], limit)] for name, limit in LIMITS.items()
    }
    presets: dict[Quality, Preset] = {}
    for quality, allowed in candidates.items():
        if allowed:
            best = min(allowed, key=lambda entry: entry["seconds"])
            method = resolve_settings(manifest, {"method": best["method"]}).method
            presets[quality] = _make_preset(method, best, report["images_per_method"])
    return presets


def is_within_limit(metrics: Mapping[str, Any], limit: QualityLimit) -> bool:
    excess = metrics["excess_nll"]["difference_to_ar"]
    if max(-excess["low"], excess["high"]) > limit.max_excess_nll:
        return False
    return "agreement" not in metrics or metrics["agreement"]["difference_to_ar"]["low"] >= -limit.max_agreement_loss


def _make_preset(method: MethodConfig, report_entry: Mapping[str, Any], images: int) -> Preset:
    figures = report_entry["figures"] or {}  # None if an exact method generated the images of `ar`.
    agreement = figures.get("agreement")
    measured = PresetMeasurements(
        tokens_per_pass=report_entry["tokens_per_forward_pass"],
        excess_nll=figures["excess_nll"]["difference_to_ar"]["value"] if figures else 0.0,
        agreement=None if agreement is None else 100 * agreement["difference_to_ar"]["value"],
        images=images,
        date=datetime.date.today().isoformat(),
    )
    return Preset.model_validate({"method": method, "figures": measured})
