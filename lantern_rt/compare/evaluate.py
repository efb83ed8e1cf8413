"""Every method on the same prompts and seeds, measured against plain decoding.

A second plain set, with other seeds, is the reference of all that compares sets of images; plain decoding itself is
compared with it too, and what comes out is the floor: no method can be told from plain decoding below it.

A seed has one exact image, which every exact method draws, but for rounding. How near others come to it is
compared image by image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
from PIL.Image import Image

from ..errors import RequestError
from ..output.images import blank
from ..pipeline import Pipeline
from .image_graph import Agreement, Features
from .statistics import (
    NEAREST,
    RESAMPLES,
    Figure,
    Floats,
    Ints,
    by_prompt,
    distances,
    estimate,
    estimate_mean,
    frechet_distance,
    kernel_terms,
    mean_over_pairs,
    median_distance,
    precision_recall,
)
from .turns import Contender, Run, Subjects, take_turns

FEWEST_PROMPTS = 2
ENOUGH_PROMPTS = 30
IMAGES_PER_FEATURE = 10
REFERENCE = "ar, other seeds"
_WIDE, _RESAMPLES_WIDE = 256, 200  # features, or images if fewer, from which on a Frechet distance takes a while
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


def evaluate(
    pipeline: Pipeline,
    images: Images,
    contenders: Sequence[Contender],
    show: Show,
    features: Features | None = None,
    bandwidth: float | None = None,
    agreement: Agreement | None = None,
) -> tuple[dict[str, Any], dict[str, list[Image]]]:
    """Draw by all methods (the first is plain decoding), and compare: what was found, ready for JSON, and the images of
    every method, those of the reference last.

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
    runs = {one.label: draw(pipeline, one, images, show, score=True) for one in contenders}
    others = replace(images, first_seed=images.first_seed + images.count)
    reference = draw(pipeline, replace(contenders[0], label=REFERENCE), others, show)
    drawn = {
        label: [image for run in each for image in run.images] for label, each in {**runs, REFERENCE: reference}.items()
    }
    figures = _single_figures(list(runs.values()), images.seeds)
    if agreement is not None:
        prompts = [prompt for prompt in labels for _ in range(images.seeds)]
        agreed: list[Floats] = []
        for label in runs:
            agreed.append(agreement(drawn[label], prompts))
            show("prompt agreement", len(agreed), len(runs))
        figures["agreement"] = estimate_mean(agreed, images.seeds)
    source = None
    if features is not None:
        sets: list[Floats] = []
        for some in drawn.values():
            sets.append(features(some))
            show("features", len(sets), len(drawn))
        bandwidth = bandwidth or median_distance(sets[-1])
        source = {**features.facts, "num_features": sets[-1].shape[1], "bandwidth": bandwidth}
        figures |= feature_figures(sets[:-1], sets[-1], images.seeds, bandwidth, show)
    far = [label for label, each in runs.items() if not each[-1].settings.method.measured]
    found = {
        "prompts": labels,
        "seeds_per_prompt": images.seeds,
        "first_seed": images.first_seed,
        "images_per_method": images.count,
        "features": source,
        "agreement": None if agreement is None else agreement.facts,
        "notes": [
            *_notes(images, source, runs[contenders[0].label], reference),
            *(f"{label}: TVD is of relaxed acceptance; how far this method departs, it does not say." for label in far),
        ],
        "methods": [
            {
                "method": label,
                "settings": each[-1].settings.as_dict(),
                "choice": each[-1].settings.choice,
                "seconds": sum(run.seconds for run in each),
                "figures": {name: figure[i] for name, figure in figures.items()},
            }
            for i, (label, each) in enumerate(runs.items())
        ],
    }
    return found, drawn


def draw(pipeline: Pipeline, contender: Contender, images: Images, show: Show, score: bool = False) -> list[Run]:
    """Draw all images by one method, subject by subject. score: with likelihoods."""
    runs: list[Run] = []
    show(contender.label, 0, images.count)
    for turn in take_turns(pipeline, [contender], images.requests(), score=score):
        runs += turn
        show(contender.label, sum(len(run.codes) for run in runs), images.count)
    return runs


def _single_figures(methods: Sequence[Sequence[Run]], seeds: int) -> dict[str, Figure]:
    """Figures of single images, by the runs of every method."""
    scores = [[score for run in runs for score in run.likelihoods] for runs in methods]
    counts = [[image for run in runs for image in run.statistics.per_image] for runs in methods]
    codes = np.stack([_codes(runs) for runs in methods])
    same, length = codes == codes[0], codes.shape[2]
    likelihoods = [[score.nats for score in row] for row in scores]
    nats = by_prompt(likelihoods, seeds)

    def ratio(chosen: Ints) -> Floats:
        means = np.maximum(nats[:, chosen].mean(1), np.finfo(np.float32).eps)  # 0 where the target is certain
        return np.asarray(means / means[0])

    passes = [[length / image.target_passes for image in row] for row in counts]
    return {
        "tokens_per_forward_pass": estimate_mean(passes, seeds),
        "tvd": estimate_mean([[image.realised_tvd / length for image in row] for row in counts], seeds),
        "same_tokens": estimate_mean(list(same.mean(2)), seeds),
        "same_start": estimate_mean(list(np.logical_and.accumulate(same, 2).mean(2)), seeds),
        "excess_nll": estimate_mean([[score.nats - score.entropy for score in row] for row in scores], seeds),
        "nll": estimate_mean(likelihoods, seeds),
        "nll_ratio": estimate(ratio, nats.shape[1]),
    }


def _codes(runs: Sequence[Run]) -> Ints:
    """Codes `[images, cells]` of all images."""
    return np.array([row for run in runs for row in run.codes])


def feature_figures(
    sets: Sequence[Floats], reference: Floats, seeds: int, bandwidth: float, show: Show
) -> dict[str, Figure]:
    """Figures of `sets`, features `[prompts x seeds, width]` of every method, against those of the reference.

    `distance_to_exact` is missing where plain images do not depend on the seed: it counts in distances between seeds.
    """
    prompts = len(reference) // seeds
    of_prompts = np.arange(len(reference)).reshape(prompts, seeds)
    resamples, evaluated = _RESAMPLES_WIDE if min(reference.shape) >= _WIDE else RESAMPLES, count()

    def frechet(chosen: Ints) -> list[float]:
        images = of_prompts[chosen].ravel()
        show("Frechet distances", next(evaluated), resamples)
        return [frechet_distance(own[images], reference[images]) for own in sets]

    def over_pairs(tables: Sequence[Floats]) -> Figure:
        return estimate(lambda chosen: [mean_over_pairs(table, chosen) for table in tables], prompts)

    gaps = by_prompt([np.linalg.norm(own - sets[0], axis=1) for own in sets], seeds)
    units = np.array([distances(sets[0][images], reference[images]).mean() for images in of_prompts])

    def to_exact(chosen: Ints) -> Floats:
        return np.asarray(gaps[:, chosen].mean(1) / (units[chosen].mean() or units.mean()))

    precision, recall = zip(*(precision_recall(own, reference) for own in sets), strict=True)
    apart = [distances(own, own) for own in sets]
    within = [[mean_over_pairs(table, images) for images in of_prompts] for table in apart]
    return {
        **({"distance_to_exact": estimate(to_exact, prompts)} if units.any() else {}),
        "frechet": estimate(frechet, prompts, resamples, moved=True),
        "kernel": over_pairs([kernel_terms(own, reference, seeds, bandwidth) for own in sets]),
        "precision": estimate_mean(precision, seeds),
        "recall": estimate_mean(recall, seeds),
        # of one prompt where every prompt has several, else of any two
        "diversity": over_pairs(apart) if seeds == 1 else estimate_mean(within, 1),
    }


def _notes(
    images: Images, features: dict[str, Any] | None, plain: Sequence[Run], reference: Sequence[Run]
) -> list[str]:
    """What limits the figures. plain: runs of plain decoding, reference: those with other seeds."""
    notes = []
    if (prompts := len(images.subjects.items)) < ENOUGH_PROMPTS:
        notes.append(f"{prompts} prompts: intervals of fewer than {ENOUGH_PROMPTS} are too narrow.")
    if features is None:
        notes.append(
            "No features: the bundle has no vq_encoder and --features was not given, so distances of images, "
            "precision, recall and diversity are missing."
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
    if reference[0].settings.sampling.greedy:
        notes.append(
            "Temperature 0: plain images do not depend on the seed, so ar is at distance 0 from itself, and distances "
            "to its image of a seed have no measure."
        )
    else:
        shared = (_codes(plain) == _codes(reference)).mean()
        notes.append(f"Images of ar with other seeds share {shared:.0%} of the tokens: only what shares more is near.")
    return notes
