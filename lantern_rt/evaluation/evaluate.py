"""Every way of drawing on the same prompts and seeds, measured against plain decoding.

A second plain set, with other seeds, is the reference of all that compares sets of pictures; plain decoding itself is
compared with it too, and what comes out is the floor: no way can be told from plain decoding below it.

Does not know files, command lines or how a report looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from PIL.Image import Image

from ..errors import RequestError
from ..output.images import blank
from ..pipeline import Pipeline
from .agreement import Agreement
from .drawing import Drawn, Show, Subjects, Way, draw
from .features import Extractor
from .statistics import (
    NEAREST,
    Bools,
    Figure,
    Floats,
    Ints,
    Statistic,
    estimate,
    frechet_distance,
    kernel_terms,
    mean_over_pairs,
    median_distance,
    on_manifold,
    pairwise_distances,
)

FEWEST_PROMPTS = 2
ENOUGH_PROMPTS = 30
PICTURES_PER_FEATURE = 10
RESAMPLES, RESAMPLES_WIDE = 1000, 200
_WIDE = 256  # features, or pictures if fewer, from which on a Frechet distance takes a while


@dataclass(frozen=True)
class Instruments:
    """What pictures are measured with; None leaves those figures out.

    bandwidth: of the kernel distance, None for the median distance of two pictures of the reference.
    """

    extractor: Extractor | None = None
    bandwidth: float | None = None
    agreement: Agreement | None = None


@dataclass(frozen=True)
class FeatureSource:
    """Where features came from: a name, the graph's file and hash, how many there are, and the kernel's bandwidth."""

    name: str
    file: str
    sha256: str
    width: int
    bandwidth: float


@dataclass(frozen=True)
class AgreementSource:
    """Where prompt agreement came from: a name, the graph's file and hash, and the tokenizer it was used with."""

    name: str
    file: str
    sha256: str
    tokenizer: str


@dataclass(frozen=True)
class Evaluation:
    """All that was found. figures: by name, with one value per way, plain decoding's first; those of instruments that
    were not there are missing. notes: what limits them. reference: plain pictures with other seeds."""

    subjects: Subjects
    drawn: list[Drawn]
    reference: list[Image]
    features: FeatureSource | None
    agreement: AgreementSource | None
    figures: dict[str, Figure]
    notes: list[str]


def check_evaluation(subjects: Subjects) -> None:
    """RequestError if there is too little to draw."""
    if len(subjects.labels) < FEWEST_PROMPTS:
        raise RequestError(f"prompts: found {len(subjects.labels)}, expected at least {FEWEST_PROMPTS} to compare")


def evaluate(
    pipeline: Pipeline, subjects: Subjects, ways: Sequence[Way], images: int, instruments: Instruments, show: Show
) -> Evaluation:
    """Draw all ways (the first is plain decoding) and the reference, `images` pictures at a time, and compare."""
    check_evaluation(subjects)
    extractor, agreement = instruments.extractor, instruments.agreement
    manifest = pipeline.bundle.manifest
    nothing = blank(manifest.image_width, manifest.image_height)
    if extractor is not None:  # let it fail before the work
        extractor([nothing])
    if agreement is not None:
        agreement([nothing], [max(subjects.labels, key=len)])
    drawn = [draw(pipeline, way, subjects, images, show) for way in ways]
    reference = [
        picture.image for picture in draw(pipeline, ways[0], subjects, images, show, other_seeds=True).pictures
    ]
    figures = _likelihood_figures(drawn, subjects.seeds)
    judged = source = None
    if agreement is not None:
        figures["agreement"] = _agreement_figure(drawn, subjects, agreement, show)
        judged = AgreementSource(agreement.name, agreement.file, agreement.sha256, agreement.tokenizer)
    if extractor is not None:
        sets: list[Floats] = []
        for one in [*drawn, None]:
            sets.append(extractor(reference if one is None else [picture.image for picture in one.pictures]))
            show("features", len(sets), len(drawn) + 1)
        bandwidth = instruments.bandwidth or median_distance(sets[-1])
        source = FeatureSource(extractor.name, extractor.file, extractor.sha256, sets[0].shape[1], bandwidth)
        figures |= feature_figures(sets[:-1], sets[-1], subjects.seeds, bandwidth, show)
    notes = _notes(subjects, source, drawn[0].settings["temperature"] == 0)
    return Evaluation(subjects, drawn, reference, source, judged, figures, notes)


def _agreement_figure(drawn: Sequence[Drawn], subjects: Subjects, agreement: Agreement, show: Show) -> Figure:
    """How well pictures show their prompts."""
    prompts = [prompt for prompt in subjects.labels for _ in range(subjects.seeds)]
    found: list[Floats] = []
    for one in drawn:
        found.append(agreement([picture.image for picture in one.pictures], prompts))
        show("prompt agreement", len(found), len(drawn))
    return _mean(found, subjects.seeds)


def _likelihood_figures(drawn: Sequence[Drawn], seeds: int) -> dict[str, Figure]:
    """Figures of single pictures."""
    pictures = [one.pictures for one in drawn]
    scores = [[picture.likelihood for picture in row if picture.likelihood is not None] for row in pictures]
    likelihoods = [[score.nats for score in row] for row in scores]
    nats = _by_prompt(likelihoods, seeds)

    def ratio(chosen: Ints) -> Floats:
        means = nats[:, chosen].mean(1)
        return np.asarray(means / means[0])

    return {
        "codes_per_pass": _mean([[picture.codes_per_pass for picture in row] for row in pictures], seeds),
        "tvd": _mean([[picture.tvd for picture in row] for row in pictures], seeds),
        "surprise": _mean([[score.nats - score.entropy for score in row] for row in scores], seeds),
        "nll": _mean(likelihoods, seeds),
        "nll_ratio": estimate(ratio, nats.shape[1], RESAMPLES),
    }


def feature_figures(
    sets: Sequence[Floats], reference: Floats, seeds: int, bandwidth: float, show: Show
) -> dict[str, Figure]:
    """Figures of `sets`, features `[prompts x seeds, width]` of every way, against those of the reference."""
    prompts = len(reference) // seeds
    of_prompts = np.arange(len(reference)).reshape(prompts, seeds)
    resamples = RESAMPLES_WIDE if min(reference.shape) >= _WIDE else RESAMPLES
    evaluated = 0

    def frechet(chosen: Ints) -> list[float]:
        nonlocal evaluated
        pictures = of_prompts[chosen].ravel()
        found = [frechet_distance(own[pictures], reference[pictures]) for own in sets]
        evaluated += 1
        show("Frechet distances", min(evaluated, resamples), resamples)
        return found

    terms = [kernel_terms(own, reference, seeds, bandwidth) for own in sets]
    return {
        "frechet": estimate(frechet, prompts, resamples, moved=True),
        "kernel": estimate(lambda chosen: [mean_over_pairs(one, chosen) for one in terms], prompts, RESAMPLES),
        "precision": _mean([on_manifold(own, reference) for own in sets], seeds),
        "recall": _mean([on_manifold(reference, own) for own in sets], seeds),
        "diversity": estimate(_diversity(sets, of_prompts), prompts, RESAMPLES),
    }


def _diversity(sets: Sequence[Floats], of_prompts: Ints) -> Statistic:
    """Mean distance of two pictures: of one prompt where every prompt has several, else of any two."""
    distances = [pairwise_distances(own) for own in sets]
    seeds = of_prompts.shape[1]
    if seeds == 1:
        return lambda chosen: [mean_over_pairs(each, chosen) for each in distances]
    within = np.array([[mean_over_pairs(each, pictures) for pictures in of_prompts] for each in distances])
    return lambda chosen: within[:, chosen].mean(1)


def _by_prompt(values: Sequence[Sequence[float] | Bools | Floats], seeds: int) -> Floats:
    """Means over a prompt's pictures `[ways, prompts]`."""
    table = np.array(values, np.float64)
    return np.asarray(table.reshape(len(table), -1, seeds).mean(2))


def _mean(values: Sequence[Sequence[float] | Bools | Floats], seeds: int) -> Figure:
    table = _by_prompt(values, seeds)
    return estimate(lambda chosen: table[:, chosen].mean(1), table.shape[1], RESAMPLES)


def _notes(subjects: Subjects, source: FeatureSource | None, greedy: bool) -> list[str]:
    notes = []
    pictures, prompts = subjects.pictures, len(subjects.labels)
    if prompts < ENOUGH_PROMPTS:
        notes.append(f"{prompts} prompts: intervals of fewer than {ENOUGH_PROMPTS} are too narrow.")
    if source is None:
        notes.append(
            "No features: the bundle has no vq_encoder and --features was not given, so Frechet distance, kernel "
            "distance, precision, recall and diversity are missing."
        )
    elif pictures < (needed := PICTURES_PER_FEATURE * source.width):
        notes.append(
            f"{pictures} pictures for {source.width} features, expected at least {needed}: ar's own Frechet distance "
            "is mostly an effect of so few, and small differences drown in it."
        )
    if source is not None:
        notes.append(f"Distances between {source.name} say nothing about those of another feature extractor.")
        if pictures <= NEAREST:
            notes.append(f"Precision and recall need more than {NEAREST} pictures.")
    if greedy:
        notes.append("Temperature 0: plain pictures do not depend on the seed, so ar is at distance 0 from itself.")
    return notes


def as_dict(found: Evaluation) -> dict[str, object]:
    """The same without pictures, ready for JSON."""
    subjects = found.subjects
    return {
        "prompts": subjects.labels,
        "seeds_per_prompt": subjects.seeds,
        "first_seed": subjects.first_seed,
        "pictures_per_method": subjects.pictures,
        "features": None if found.features is None else asdict(found.features),
        "agreement": None if found.agreement is None else asdict(found.agreement),
        "notes": found.notes,
        "methods": [
            {
                "method": one.way.label,
                "settings": one.settings,
                "choice": one.choice,
                "seconds": one.seconds,
                "figures": {
                    name: {
                        **asdict(figure.values[i]),
                        "difference_to_ar": asdict(figure.differences[i]),
                        "above_ar_interval": figure.above_first(i),
                    }
                    for name, figure in found.figures.items()
                },
            }
            for i, one in enumerate(found.drawn)
        ],
    }
