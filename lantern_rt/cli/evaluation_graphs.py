"""The graphs that `eval` measures pictures with, made of what the user wrote.

Does not know what is drawn, nor how figures come about.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..bundle.files import Bundle
from ..checks import number, short, whole
from ..errors import RequestError
from ..evaluation.agreement import Agreement, GraphAgreement
from ..evaluation.evaluate import Instruments
from ..evaluation.features import Extractor, GraphFeatures, bundle_features
from ..evaluation.picture_graph import Preprocessing, Triple
from ..evaluation.prompt_tokens import bundle_tokens, file_tokens

_MOST_SIZE = 4096
_BANDWIDTHS = 1e-9, 1e9


@dataclass(frozen=True)
class GivenGraph:
    """A graph, and how pictures are prepared for it; None where the user said nothing."""

    path: Path | None
    size: int | None
    mean: str | None
    std: str | None


@dataclass(frozen=True)
class GivenInstruments:
    """All that the user said about graphs."""

    features: GivenGraph
    bandwidth: float | None
    agreement: GivenGraph
    tokenizer: Path | None


def open_instruments(bundle: Bundle, given: GivenInstruments, threads: int | None) -> Instruments:
    """Open the user's graphs, or the bundle's; RequestError where options or graphs do not fit."""
    bandwidth = None
    if given.bandwidth is not None:
        bandwidth = number("bandwidth", given.bandwidth, 0, *_BANDWIDTHS)
    extractor = _extractor(bundle, given.features, threads)
    if bandwidth is not None and extractor is None:
        raise RequestError(f"bandwidth: bundle {bundle.manifest.name} has no features of its own; give --features too")
    return Instruments(extractor, bandwidth, _agreement(bundle, given.agreement, given.tokenizer, threads))


def _extractor(bundle: Bundle, given: GivenGraph, threads: int | None) -> Extractor | None:
    """The user's graph, or the bundle's."""
    if given.path is None:
        _refuse_idle("feature", "--features", given)
        return bundle_features(bundle, threads)
    return GraphFeatures(given.path, _preprocessing("feature", given), given.path.stem, threads)


def _agreement(bundle: Bundle, given: GivenGraph, tokenizer: Path | None, threads: int | None) -> Agreement | None:
    """The user's graph."""
    if given.path is None:
        _refuse_idle("agreement", "--agreement", given)
        if tokenizer is not None:
            raise RequestError("agreement-tokenizer: makes tokens for --agreement, which is not given")
        return None
    manifest = bundle.manifest
    if manifest.condition.kind == "class":
        raise RequestError(f"agreement: bundle {manifest.name} takes class ids, not prompts; leave --agreement out")
    prepare = _preprocessing("agreement", given)
    tokens = partial(bundle_tokens, bundle) if tokenizer is None else partial(file_tokens, tokenizer)
    name = f"the tokenizer of {manifest.name}" if tokenizer is None else tokenizer.name
    return GraphAgreement(given.path, prepare, tokens, name, threads)


def _refuse_idle(prefix: str, graph: str, given: GivenGraph) -> None:
    preparing = {"size": given.size, "mean": given.mean, "std": given.std}
    if idle := [name for name, value in preparing.items() if value is not None]:
        raise RequestError(f"{prefix}-{idle[0]}: says how pictures are prepared for {graph}, which is not given")


def _preprocessing(prefix: str, given: GivenGraph) -> Preprocessing:
    size = None if given.size is None else whole(f"{prefix}-size", given.size, 0, 8, _MOST_SIZE)
    mean = _triple(f"{prefix}-mean", given.mean, 0.0)
    std = _triple(f"{prefix}-std", given.std, 1.0)
    if min(std) <= 0:
        raise RequestError(f"{prefix}-std: found {short(given.std)}, expected numbers above 0")
    return Preprocessing(size, mean, std)


def _triple(name: str, text: str | None, default: float) -> Triple:
    """One number for all channels, or three."""
    if text is None:
        return default, default, default
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 3) or not all(abs(one) < 1e6 for one in numbers):
        raise RequestError(f"{name}: found {short(text)}, expected a number, or three as in 0.48,0.46,0.41")
    red, green, blue = numbers * (3 // len(numbers))
    return red, green, blue
