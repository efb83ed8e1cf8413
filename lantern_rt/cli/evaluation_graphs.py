"""The graphs that `eval` measures pictures with, made of what the user wrote."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

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
class GivenInstruments:
    """All that the user said about graphs, and how pictures are prepared for them."""

    features: Annotated[
        Path | None,
        typer.Option(
            help="ONNX graph from pictures to features, such as Inception. [default: the bundle's VQ encoder]"
        ),
    ] = None
    feature_size: Annotated[
        int | None, typer.Option(help="Width and height of pictures for --features. [default: its own]")
    ] = None
    feature_mean: Annotated[
        str | None, typer.Option(help="Taken off RGB values 0 .. 1: a number, or three, by commas. [default: 0]")
    ] = None
    feature_std: Annotated[str | None, typer.Option(help="What they are then divided by. [default: 1]")] = None
    bandwidth: Annotated[
        float | None,
        typer.Option(help="Bandwidth of the kernel distance; 10 for CMMD. [default: median distance of features]"),
    ] = None
    agreement: Annotated[
        Path | None,
        typer.Option(help="ONNX graph from pictures and token ids to their agreement, such as CLIP. [default: none]"),
    ] = None
    agreement_tokenizer: Annotated[
        Path | None, typer.Option(help="Its tokenizer.json. [default: the bundle's list of words]")
    ] = None
    agreement_size: Annotated[int | None, typer.Option(help="As --feature-size, for --agreement.")] = None
    agreement_mean: Annotated[str | None, typer.Option(help="As --feature-mean, for --agreement.")] = None
    agreement_std: Annotated[str | None, typer.Option(help="As --feature-std, for --agreement.")] = None


def open_instruments(bundle: Bundle, given: GivenInstruments, threads: int | None) -> Instruments:
    """Open the user's graphs, or the bundle's; RequestError where options or graphs do not fit."""
    bandwidth = None
    if given.bandwidth is not None:
        bandwidth = number("bandwidth", given.bandwidth, 0, *_BANDWIDTHS)
    extractor = _extractor(bundle, given, threads)
    if bandwidth is not None and extractor is None:
        raise RequestError(f"bandwidth: bundle {bundle.manifest.name} has no features of its own; give --features too")
    return Instruments(extractor, bandwidth, _agreement(bundle, given, threads))


def _extractor(bundle: Bundle, given: GivenInstruments, threads: int | None) -> Extractor | None:
    """The user's graph, or the bundle's."""
    prepare = _preprocessing(given, "feature", "--features", given.features is not None)
    if given.features is None:
        return bundle_features(bundle, threads)
    return GraphFeatures(given.features, prepare, given.features.stem, threads)


def _agreement(bundle: Bundle, given: GivenInstruments, threads: int | None) -> Agreement | None:
    """The user's graph."""
    manifest, tokenizer = bundle.manifest, given.agreement_tokenizer
    prepare = _preprocessing(given, "agreement", "--agreement", given.agreement is not None)
    if given.agreement is None:
        if tokenizer is not None:
            raise RequestError("agreement-tokenizer: makes tokens for --agreement, which is not given")
        return None
    if manifest.condition.kind == "class":
        raise RequestError(f"agreement: bundle {manifest.name} takes class ids, not prompts; leave --agreement out")
    tokens = partial(bundle_tokens, bundle) if tokenizer is None else partial(file_tokens, tokenizer)
    name = f"the tokenizer of {manifest.name}" if tokenizer is None else tokenizer.name
    return GraphAgreement(given.agreement, prepare, tokens, name, threads)


def _preprocessing(given: GivenInstruments, prefix: str, graph: str, used: bool) -> Preprocessing:
    """How pictures are prepared for a graph, by the options of this prefix; RequestError if set without the graph."""
    options = {name: getattr(given, f"{prefix}_{name}") for name in ("size", "mean", "std")}
    if not used and (idle := [name for name, value in options.items() if value is not None]):
        raise RequestError(f"{prefix}-{idle[0]}: says how pictures are prepared for {graph}, which is not given")
    size = None if options["size"] is None else whole(f"{prefix}-size", options["size"], 0, 8, _MOST_SIZE)
    mean = _triple(f"{prefix}-mean", options["mean"], 0.0)
    std = _triple(f"{prefix}-std", options["std"], 1.0)
    if min(std) <= 0:
        raise RequestError(f"{prefix}-std: found {short(options['std'])}, expected numbers above 0")
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
