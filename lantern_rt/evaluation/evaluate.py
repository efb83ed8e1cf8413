"""Every method on the same prompts and seeds, measured against plain decoding.

A second plain set, with other seeds, is the reference of all that compares sets of images; plain decoding itself is
compared with it too, and what comes out is the floor: no method can be told from plain decoding below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL.Image import Image

from ..errors import RequestError
from ..output.images import blank
from ..pipeline import Pipeline
from ..runner import Contender, Run, Subjects, take_turns
from .image_graph import Agreement, Features
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
    precision_recall,
)

FEWEST_PROMPTS = 2
ENOUGH_PROMPTS = 30
IMAGES_PER_FEATURE = 10
RESAMPLES, RESAMPLES_WIDE = 1000, 200
_WIDE = 256  # features, or images if fewer, from which on a Frechet distance takes a while
Show = Callable[[str, int, int], None]  # what is being done, how many images are done, of how many


@dataclass(frozen=True)
class Images:
    """Which images are drawn: every subject with `seeds` seeds, `batch` at a time; image n has seed first_seed + n."""

    subjects: Subjects
    seeds: int
    first_seed: int
    batch: int

    @property
    def count(self) -> int:
        """How many images a method draws."""
        return len(self.subjects.items) * self.seeds

    def requests(self) -> Iterator[dict[str, Any]]:
        """Arguments of pipeline calls that draw them, subject by subject."""
        return self.subjects.requests(self.batch, self.seeds, self.first_seed)


@dataclass(frozen=True)
class Drawn:
    """All images of one method, subject by subject, with the runs that they come from."""

    label: str
    runs: list[Run]

    @property
    def images(self) -> list[Image]:
        """The images."""
        return [image for run in self.runs for image in run.images]


@dataclass(frozen=True)
class Evaluation:
    """All that was found. figures: by name, with one value per method, plain decoding's first; those of graphs that
    were not there are missing. features, agreement: where those figures come from. notes: what limits them.
    reference: plain images with other seeds."""

    images: Images
    drawn: list[Drawn]
    reference: list[Image]
    features: dict[str, Any] | None
    agreement: dict[str, Any] | None
    figures: dict[str, Figure]
    notes: list[str]


def evaluate(
    pipeline: Pipeline,
    images: Images,
    contenders: Sequence[Contender],
    show: Show,
    features: Features | None = None,
    bandwidth: float | None = None,
    agreement: Agreement | None = None,
) -> Evaluation:
    """Draw by all methods (the first is plain decoding), and compare.

    features, agreement: None leaves their figures out. bandwidth: of the kernel distance, None for the median distance
    of two images of the reference.
    Raises: RequestError: too few subjects, or a graph fails.
    """
    labels, manifest = images.subjects.labels, pipeline.bundle.manifest
    if len(labels) < FEWEST_PROMPTS:
        raise RequestError(f"prompts: found {len(labels)}, expected at least {FEWEST_PROMPTS} to compare")
    nothing = blank(manifest.image_width, manifest.image_height)
    if features is not None:  # let it fail before the work
        features([nothing])
    if agreement is not None:
        agreement([nothing], [max(labels, key=len)])
    drawn = [draw(pipeline, contender, images, show, score=True) for contender in contenders]
    others = replace(images, first_seed=images.first_seed + images.count)
    reference = draw(pipeline, replace(contenders[0], label="ar, other seeds"), others, show).images
    figures = _single_figures(drawn, images.seeds)
    asked, source = None, None
    if agreement is not None:
        asked, prompts = agreement.facts, [prompt for prompt in labels for _ in range(images.seeds)]
        agreed = []
        for one in drawn:
            agreed.append(agreement(one.images, prompts))
            show("prompt agreement", len(agreed), len(drawn))
        figures["agreement"] = _mean(agreed, images.seeds)
    if features is not None:
        sets: list[Floats] = []
        for some in (*(one.images for one in drawn), reference):
            sets.append(features(some))
            show("features", len(sets), len(drawn) + 1)
        bandwidth = bandwidth or median_distance(sets[-1])
        source = {**features.facts, "num_features": sets[-1].shape[1], "bandwidth": bandwidth}
        figures |= feature_figures(sets[:-1], sets[-1], images.seeds, bandwidth, show)
    notes = _notes(images, source, drawn[0].runs[0].settings.sampling.greedy)
    return Evaluation(images, drawn, reference, source, asked, figures, notes)


def draw(pipeline: Pipeline, contender: Contender, images: Images, show: Show, score: bool = False) -> Drawn:
    """Draw all images by one method. score: with likelihoods."""
    runs: list[Run] = []
    for turn in take_turns(pipeline, [contender], images.requests(), score=score):
        runs += turn
        show(contender.label, sum(len(run.codes) for run in runs), images.count)
    return Drawn(contender.label, runs)


def _single_figures(drawn: Sequence[Drawn], seeds: int) -> dict[str, Figure]:
    """Figures of single images."""
    scores = [[score for run in one.runs for score in run.likelihoods] for one in drawn]
    likelihoods = [[score.nats for score in row] for row in scores]
    nats = _by_prompt(likelihoods, seeds)

    def ratio(chosen: Ints) -> Floats:
        means = nats[:, chosen].mean(1)
        return np.asarray(means / means[0])

    counts = [[image for run in one.runs for image in run.statistics.per_image] for one in drawn]
    length = len(drawn[0].runs[0].codes[0])
    return {
        "tokens_per_forward_pass": _mean([[length / image.target_passes for image in row] for row in counts], seeds),
        "tvd": _mean([[image.realised_tvd / length for image in row] for row in counts], seeds),
        "excess_nll": _mean([[score.nats - score.entropy for score in row] for row in scores], seeds),
        "nll": _mean(likelihoods, seeds),
        "nll_ratio": estimate(ratio, nats.shape[1], RESAMPLES),
    }


def feature_figures(
    sets: Sequence[Floats], reference: Floats, seeds: int, bandwidth: float, show: Show
) -> dict[str, Figure]:
    """Figures of `sets`, features `[prompts x seeds, width]` of every method, against those of the reference."""
    prompts = len(reference) // seeds
    of_prompts = np.arange(len(reference)).reshape(prompts, seeds)
    resamples = RESAMPLES_WIDE if min(reference.shape) >= _WIDE else RESAMPLES
    evaluated = 0

    def frechet(chosen: Ints) -> list[float]:
        nonlocal evaluated
        images = of_prompts[chosen].ravel()
        found = [frechet_distance(own[images], reference[images]) for own in sets]
        evaluated += 1
        show("Frechet distances", min(evaluated, resamples), resamples)
        return found

    terms = [kernel_terms(own, reference, seeds, bandwidth) for own in sets]
    precision, recall = zip(*(precision_recall(own, reference) for own in sets), strict=True)
    return {
        "frechet": estimate(frechet, prompts, resamples, moved=True),
        "kernel": estimate(lambda chosen: [mean_over_pairs(one, chosen) for one in terms], prompts, RESAMPLES),
        "precision": _mean(precision, seeds),
        "recall": _mean(recall, seeds),
        "diversity": estimate(_diversity(sets, of_prompts), prompts, RESAMPLES),
    }


def _diversity(sets: Sequence[Floats], of_prompts: Ints) -> Statistic:
    """Mean distance of two images: of one prompt where every prompt has several, else of any two."""
    from scipy.spatial.distance import cdist  # type: ignore[import-untyped]

    distances = [cdist(own, own) for own in sets]
    if of_prompts.shape[1] == 1:
        return lambda chosen: [mean_over_pairs(each, chosen) for each in distances]
    within = np.array([[mean_over_pairs(each, images) for images in of_prompts] for each in distances])
    return lambda chosen: within[:, chosen].mean(1)


def _by_prompt(values: Sequence[Sequence[float] | Bools | Floats], seeds: int) -> Floats:
    """Means over a prompt's images `[methods, prompts]`."""
    table = np.array(values, np.float64)
    return np.asarray(table.reshape(len(table), -1, seeds).mean(2))


def _mean(values: Sequence[Sequence[float] | Bools | Floats], seeds: int) -> Figure:
    table = _by_prompt(values, seeds)
    return estimate(lambda chosen: table[:, chosen].mean(1), table.shape[1], RESAMPLES)


def _notes(images: Images, features: dict[str, Any] | None, greedy: bool) -> list[str]:
    """What limits the figures."""
    notes = []
    prompts = len(images.subjects.items)
    if prompts < ENOUGH_PROMPTS:
        notes.append(f"{prompts} prompts: intervals of fewer than {ENOUGH_PROMPTS} are too narrow.")
    if features is None:
        notes.append(
            "No features: the bundle has no vq_encoder and --features was not given, so Frechet distance, kernel "
            "distance, precision, recall and diversity are missing."
        )
    else:
        if images.count < (needed := IMAGES_PER_FEATURE * features["num_features"]):
            notes.append(
                f"{images.count} images for {features['num_features']} features, expected at least {needed}: ar's own "
                "Frechet distance is mostly an effect of so few, and small differences drown in it."
            )
        notes.append(f"Distances between {features['name']} say nothing about those of another feature extractor.")
        if images.count <= NEAREST:
            notes.append(f"Precision and recall need more than {NEAREST} images.")
    if greedy:
        notes.append("Temperature 0: plain images do not depend on the seed, so ar is at distance 0 from itself.")
    return notes


def as_dict(found: Evaluation) -> dict[str, object]:
    """Everything but the images, ready for JSON."""
    return {
        "prompts": found.images.subjects.labels,
        "seeds_per_prompt": found.images.seeds,
        "first_seed": found.images.first_seed,
        "images_per_method": found.images.count,
        "features": found.features,
        "agreement": found.agreement,
        "notes": found.notes,
        "methods": [
            {
                "method": one.label,
                "settings": one.runs[-1].settings.as_dict(),
                "choice": one.runs[-1].settings.choice,
                "seconds": sum(run.seconds for run in one.runs),
                "figures": {
                    name: {
                        **figure.values[i]._asdict(),
                        "difference_to_ar": figure.differences[i]._asdict(),
                        "above_ar_interval": figure.above_first(i),
                    }
                    for name, figure in found.figures.items()
                },
            }
            for i, one in enumerate(found.drawn)
        ],
    }
