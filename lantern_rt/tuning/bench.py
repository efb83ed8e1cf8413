"""Ways of decoding against plain decoding: speed, where the time goes, and what they give away.

Every turn runs all ways on the same prompts and seeds, one after another, each turn beginning with another one; a way's
speed is the median over turns. Times are of whole calls, text and pictures included. Likelihoods are computed between
turns.

Does not know the command line, tables or charts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..bundle.files import Bundle
from ..bundle.manifest import Manifest
from ..bundle.onnx_scan import NotOnnx, float_weights
from ..engines.bandwidth import read_bandwidth
from ..errors import BundleError
from ..evaluation.drawing import Way
from ..pipeline import Pipeline
from ..requests import Settings
from ..runtime.statistics import Statistics
from .measure import Calibration, Say

FEWEST_TURNS = 3
_DYNAMIC, _STATIC = "dynamic-8-4-2", "chain-3"  # trees where the bundle has none of the kind


@dataclass(frozen=True)
class Run:
    """One call: its seconds, what the decode says of itself, and nats per code of every image."""

    seconds: float
    stats: Statistics
    nats: list[float]


@dataclass(frozen=True)
class Row:
    """One way and its runs, a run a turn; settings: what was used."""

    way: Way
    settings: Settings
    runs: list[Run]


@dataclass(frozen=True)
class Bench:
    """Rows, the one of plain decoding first. limit: seconds that reading the target's weights once takes, or None."""

    rows: list[Row]
    images: int
    codes: int
    limit: float | None

    def figures(self, row: Row) -> dict[str, Any]:
        """What a row says, ready for JSON; times and shares are of whole calls."""
        runs, plain = row.runs, self.rows[0].runs
        total = sum(run.seconds for run in runs)
        passes = sum(run.stats.target_passes for run in runs)
        per_call = statistics.median(run.seconds for run in runs)
        speeds = [other.seconds / run.seconds for run, other in zip(runs, plain, strict=True)]
        nats, plain_nats = ([nat for run in one for nat in run.nats] for one in (runs, plain))
        ratio, error = paired_ratio(nats, plain_nats)
        inside = {
            "target": sum(run.stats.target_seconds for run in runs),
            "drafter": sum(run.stats.drafter_seconds for run in runs),
            "host": sum(run.stats.host_seconds for run in runs),
        }
        return {
            "way": row.way.label,
            "method": row.settings.method,
            "settings": row.settings.as_dict(),
            "choice": row.settings.choice,
            "images_per_second": self.images / per_call,
            "codes_per_second": self.images * self.codes / per_call,
            "speed_against_ar": statistics.median(speeds),
            "speeds_against_ar": speeds,
            "tokens_per_target_pass": statistics.mean(run.stats.tokens_per_target_pass for run in runs),
            "drafter_passes_per_target_pass": sum(run.stats.drafter_passes for run in runs) / passes,
            "share": {name: seconds / total for name, seconds in inside.items()}
            | {"text_and_pictures": 1 - sum(inside.values()) / total},
            "share_of_limit": None if self.limit is None else passes * self.limit / total,
            "tvd_per_code": statistics.mean(run.stats.realised_tvd for run in runs) / self.codes,
            "nll_per_code": statistics.mean(nats),
            "nll_against_ar": ratio,
            "nll_error": error if len(nats) > 1 else None,
        }


@dataclass
class _Timed:
    """A way while its runs are collected."""

    way: Way
    settings: Settings
    runs: list[Run] = field(default_factory=list)


def usual_ways(manifest: Manifest, qualities: Sequence[str], sweep: bool) -> str:
    """Ways that the bundle can run, as `evaluation.drawing.parse_ways` reads them; sweep: several bounds of each."""
    ways = ["ar", "sjd"]
    table = manifest.neighbors > 0
    if sweep:
        ways += ["sjd:omega=1.5:anneal=0.5", "sjd:omega=2:anneal=0.5"]
        ways += ["sjd:lambda=1.5", "sjd:lambda=2", "sjd:lambda=3"] if table else []
    if manifest.drafter is not None:
        defaults = manifest.decoding.methods.get("eagle")
        own = defaults.tree if defaults else _STATIC
        dynamic = own if own.startswith("dynamic") else _DYNAMIC
        static = _STATIC if own.startswith("dynamic") else own
        ways += [f"eagle:tree={dynamic}", f"eagle:tree={static}"]
        ways += ["lantern", "lantern++"] if table else []
        if sweep and table:
            ways += [f"lantern:delta={bound}:tree={static}:children=likeliest" for bound in (0.01, 0.05, 0.2)]
            ways += [f"lantern++:lambda={bound}:tree={static}" for bound in (1.5, 2, 4)]
    return ",".join([*ways, *(f"auto:quality={quality}" for quality in qualities)])


def bench(pipeline: Pipeline, ways: Sequence[Way], calibration: Calibration, images: int, say: Say) -> Bench:
    """Run all ways, the first of which is plain decoding, on at least `images` images each, `FEWEST_TURNS` turns."""
    turns = max(FEWEST_TURNS, -(-images // calibration.images))
    timed = []
    for way in ways:
        say(f"warming up {way.label}")
        timed.append(_Timed(way, pipeline(**calibration.batch(0), **way.options).settings))
    for turn in range(turns):
        say(f"turn {turn + 1} of {turns}")
        request, results = calibration.batch(turn), []
        for i in range(len(timed)):
            one = timed[(turn + i) % len(timed)]
            began = time.perf_counter()
            result = pipeline(**request, **one.way.options)
            results.append((one, time.perf_counter() - began, result))
        for one, seconds, result in results:
            nats = pipeline.negative_log_likelihoods(result.codes, **request, **one.way.options)
            one.runs.append(Run(seconds, result.stats, nats))
    rows = [Row(one.way, one.settings, one.runs) for one in timed]
    limit = None
    situation = pipeline.situation(calibration.images, None, "")
    if situation.backend == "onnxruntime-cpu":
        size = target_bytes(pipeline.bundle)
        limit = size / read_bandwidth(size, situation.threads)
    return Bench(rows, calibration.images, pipeline.bundle.manifest.codes_per_image, limit)


def target_bytes(bundle: Bundle) -> int:
    """Bytes of the target's weights as ONNX Runtime keeps them on a CPU, where every pass reads them once.

    Floats are loaded as float32, however they are stored; block-wise integers stay what they are.
    """
    manifest, path = bundle.manifest, bundle.path("target")
    if manifest.target.precision in ("int8-weights", "int4-weights"):
        return sum(entry.bytes for role, entry in manifest.files.items() if role in ("target", "target.data"))
    try:
        return 4 * float_weights(path)
    except (NotOnnx, ValueError, OSError) as error:
        raise BundleError(f"{path}: expected an ONNX graph, found {error}") from error


def paired_ratio(scores: Sequence[float], plain: Sequence[float]) -> tuple[float, float]:
    """Ratio of the sums over the images that both have, and its standard error (infinite for one image)."""
    pairs = list(zip(scores, plain, strict=False))  # the same prompts and seeds, one list longer
    own, other = (sum(column) for column in zip(*pairs, strict=True))
    ratio = own / other
    if len(pairs) < 2:
        return ratio, float("inf")
    spread = statistics.stdev(a - ratio * b for a, b in pairs)
    return ratio, spread * len(pairs) ** 0.5 / other
