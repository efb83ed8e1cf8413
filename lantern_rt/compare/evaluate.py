"""Every method on the same prompts and seeds, measured against plain decoding.

A second plain set, with other seeds, is the reference of all that compares sets of images; plain decoding itself is
compared with it too, and what comes out is the floor: no method can be told from plain decoding below it.

A seed has one exact image, which every exact method draws, but for rounding: where its tokens are the same, there is
nothing to measure but the passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL.Image import Image

from ..engines.contracts import Progress
from ..errors import RequestError
from ..output.images import blank_image
from ..pipeline import Pipeline
from .image_graph import Agreement, Features
from .prompts import Prompts
from .statistics import RESAMPLES, Figure, Floats, Ints, estimate, estimate_mean, fit_gaussian, frechet_distance
from .turns import ComparedMethod, Run, add_likelihoods, run_in_turns

MIN_PROMPTS = 2
ENOUGH_PROMPTS = 30
IMAGES_PER_FEATURE = 10
BATCH_SIZE = 8  # images per forward pass
REFERENCE = "ar, other seeds"
_WIDE, _RESAMPLES_WIDE = 256, 200  # features, or images if fewer, from which on a Frechet distance takes a while


def evaluate(
    pipeline: Pipeline,
    prompts: Prompts,
    seeds: int,
    methods: Sequence[ComparedMethod],
    progress: Progress,
    features: Features | None = None,
    agreement: Agreement | None = None,
    real: Floats | None = None,
) -> tuple[dict[str, Any], dict[str, list[Image]]]:
    """Draw by all methods, and compare.

    Args:
        pipeline: that draws.
        prompts: to draw; image n of all has seed n, whatever the method.
        seeds: images of a prompt.
        methods: plain decoding first.
        progress: progress callback.
        features: None leaves figures of sets of images out.
        agreement: None leaves the figure of prompts out.
        real: features `[n, width]` of images, to which distances are measured instead of to plain decoding's own.

    Returns:
        The report, ready for JSON, and the images of every method that draws others than plain decoding, those of the
        reference last, if there is one.

    Raises:
        RequestError: too few prompts, or a graph fails.
    """
    labels = prompts.labels
    count = len(labels) * seeds
    manifest = pipeline.bundle.manifest
    if len(labels) < MIN_PROMPTS:
        raise RequestError(field="prompts", found=str(len(labels)), expected=f"at least {MIN_PROMPTS} to compare")
    nothing = blank_image(manifest.image_width, manifest.image_height)
    if features is not None:  # let it fail before the work
        features([nothing])
    if agreement is not None:
        agreement([nothing], [max(labels, key=len)])
    turns = list(
        run_in_turns(
            pipeline, methods, prompts.requests(BATCH_SIZE, seeds, 0), score=False, progress=progress, total=count
        )
    )
    runs = {method.label: list(own) for method, own in zip(methods, zip(*turns, strict=True), strict=True)}
    plain, *_ = runs.values()
    compared = {label: own for label, own in runs.items() if own is plain or not same_codes(own, plain)}
    for number, (label, own) in enumerate(compared.items()):
        progress("likelihoods", number, len(compared))
        requests = prompts.requests(BATCH_SIZE, seeds, 0)
        compared[label] = [add_likelihoods(pipeline, one, request) for one, request in zip(own, requests, strict=True)]
    drawn = {label: [image for one in own for image in one.images] for label, own in compared.items()}
    figures = _single_figures(list(compared.values()), seeds)
    if agreement is not None:
        figures["agreement"] = _agreement_figure(agreement, labels, seeds, drawn, progress)
    if features is not None:
        sets: list[Floats] = []
        for own_images in drawn.values():
            progress("features", len(sets), len(drawn))
            sets.append(features(own_images))
        if real is None:
            drawn[REFERENCE] = _draw_reference(pipeline, methods[0], prompts, seeds, progress)
            figures["frechet"] = frechet_figure(sets, features(drawn[REFERENCE]), seeds, progress)
        else:
            figures["frechet"] = frechet_figure(sets, real, seeds, progress, paired=False)
    columns = {label: {name: figure[i] for name, figure in figures.items()} for i, label in enumerate(compared)}
    report = {
        "prompts": labels,
        "seeds_per_prompt": seeds,
        "images_per_method": count,
        "features": None if features is None else {**features.facts, "num_features": sets[-1].shape[1]},
        "agreement": None if agreement is None else agreement.facts,
        "notes": _notes(len(labels), count, None if features is None else sets[-1].shape[1], compared),
        "methods": [
            {
                "method": label,
                "settings": own[-1].settings.as_dict(),
                "seconds": sum(one.seconds for one in own),
                "exact": own[-1].settings.method.exact,
                "same_images": label not in compared or own is plain,
                "tokens_per_forward_pass": float(np.mean(_tokens_per_pass(own))),
                "figures": columns.get(label),
            }
            for label, own in runs.items()
        ],
    }
    return report, drawn


def _draw_reference(
    pipeline: Pipeline, plain: ComparedMethod, prompts: Prompts, seeds: int, progress: Progress
) -> list[Image]:
    count = len(prompts.items) * seeds

    def report_reference(_: str, done: int, total: int) -> None:
        progress(f"images of {REFERENCE}", done, total)

    others = prompts.requests(BATCH_SIZE, seeds, first_seed=count)
    turns = run_in_turns(pipeline, [plain], others, score=False, progress=report_reference, total=count)
    return [image for (own,) in turns for image in own.images]


def same_codes(runs: Sequence[Run], plain: Sequence[Run]) -> bool:
    """Whether an exact method drew plain decoding's images, bit for bit."""
    return runs[0].settings.method.exact and np.array_equal(_codes(runs), _codes(plain))


def _codes(runs: Sequence[Run]) -> Ints:
    return np.array([row for one in runs for row in one.codes])


def _tokens_per_pass(runs: Sequence[Run]) -> list[float]:
    length = len(runs[0].codes[0])
    return [length / image.target_passes for one in runs for image in one.statistics.per_image]


def _agreement_figure(
    agreement: Agreement, labels: Sequence[str], seeds: int, drawn: Mapping[str, Sequence[Image]], progress: Progress
) -> Figure:
    """Agreement of every method's images with their prompts; drawn: images by label."""
    prompts = [label for label in labels for _ in range(seeds)]
    values: list[Floats] = []
    for own_images in drawn.values():
        progress("prompt agreement", len(values), len(drawn))
        values.append(agreement(own_images, prompts))
    return estimate_mean(values, seeds)


def _single_figures(methods: Sequence[Sequence[Run]], seeds: int) -> dict[str, Figure]:
    scores = [[score for one in runs for score in one.likelihoods] for runs in methods]
    codes = np.stack([_codes(runs) for runs in methods])  # [methods, images, cells]
    tvd = [
        [image.realised_tvd / codes.shape[2] for one in runs for image in one.statistics.per_image] for runs in methods
    ]
    return {
        "tokens_per_forward_pass": estimate_mean([_tokens_per_pass(runs) for runs in methods], seeds),
        "tvd": estimate_mean(tvd, seeds),
        "same_tokens": estimate_mean(list((codes == codes[0]).mean(2)), seeds),
        "excess_nll": estimate_mean([[score.nats - score.entropy for score in row] for row in scores], seeds),
    }


def frechet_figure(
    sets: Sequence[Floats], reference: Floats, seeds: int, progress: Progress, paired: bool = True
) -> Figure:
    """Frechet distances of sets of images to a reference.

    Args:
        sets: features `[prompts x seeds, width]` of every method.
        reference: features of the same prompts and as many seeds, or of any images.
        seeds: of a prompt.
        progress: progress callback.
        paired: whether the reference is of the same prompts, and resampled with them.
    """
    by_prompt = np.arange(len(sets[0])).reshape(-1, seeds)
    whole = fit_gaussian(reference)
    resamples = _RESAMPLES_WIDE if min(reference.shape) >= _WIDE else RESAMPLES
    evaluated = 0

    def distances(chosen: Ints) -> list[float]:
        nonlocal evaluated
        progress("Frechet distances", evaluated, resamples)
        evaluated += 1
        images = by_prompt[chosen].ravel()
        other = fit_gaussian(reference[images]) if paired else whole
        return [frechet_distance(fit_gaussian(own[images]), other) for own in sets]

    return estimate(distances, len(by_prompt), resamples, moved=True)


def _notes(prompts: int, images: int, width: int | None, compared: Mapping[str, Sequence[Run]]) -> list[str]:
    """What limits the figures.

    Args:
        prompts: that were drawn.
        images: of a method.
        width: features of an image; None without features.
        compared: runs by label.
    """
    notes = []
    if prompts < ENOUGH_PROMPTS:
        notes.append(f"{prompts} prompts: intervals of fewer than {ENOUGH_PROMPTS} are too narrow.")
    if width is None:
        notes.append("No Frechet distance: the bundle has no vq_encoder and --features was not given.")
    elif images < IMAGES_PER_FEATURE * width:
        notes.append(
            f"{images} images for {width} features, expected at least {IMAGES_PER_FEATURE * width}: ar's own "
            "Frechet distance is mostly an effect of so few, and small differences drown in it."
        )
    notes += [
        f"{label}: TVD is of relaxed acceptance; how far this method departs, it does not say."
        for label, own in compared.items()
        if not own[-1].settings.method.measures_distance
    ]
    return notes
