"""Evaluation of the images of methods against plain decoding, on the same prompts and seeds.

The reference of figures that compare sets of images is a second set by plain decoding, with other seeds. Plain decoding
is compared with this set, too: that distance is the floor, below which no difference between methods can be measured.

All exact methods generate the same image for a seed, except for rounding. Where the tokens are equal, only the number
of forward passes is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL.Image import Image

from ..engines.contracts import Progress
from ..errors import RequestError
from ..output.images import make_blank_image
from ..pipeline import Pipeline
from .image_graph import Agreement, Features
from .prompts import Prompts
from .statistics import (
    RESAMPLES,
    Figure,
    Floats,
    Ints,
    estimate_interval,
    estimate_mean,
    fit_gaussian,
    frechet_distance,
)
from .turns import ComparedMethod, Run, add_likelihoods, run_in_turns, tokens_per_pass

MIN_PROMPTS = 2
ENOUGH_PROMPTS = 30
IMAGES_PER_FEATURE = 10
BATCH_SIZE = 8
REFERENCE = "ar, other seeds"
# Frechet distances of features or images from this number on are slow and get fewer resamples.
_WIDE = 256
_RESAMPLES_WIDE = 200


def evaluate_methods(
    pipeline: Pipeline,
    prompts: Prompts,
    num_seeds: int,
    methods: Sequence[ComparedMethod],
    progress: Progress,
    features: Features | None = None,
    agreement: Agreement | None = None,
    real: Floats | None = None,
) -> tuple[dict[str, Any], dict[str, list[Image]]]:
    """Generate images with all methods and compare them with plain decoding.

    Args:
        prompts: prompts of the images. Image n of every method has seed n.
        num_seeds: number of images per prompt.
        methods: the methods, plain decoding first.
        features: graph of image features. None: the report has no Frechet distances.
        agreement: graph of prompt agreement. None: the report has no agreement.
        real: features `[n, width]` of real images, the reference of Frechet distances instead of plain decoding.

    Returns:
        The report as a JSON object, and the images by label of every method whose images differ from plain
        decoding, none if the bundle has no image decoder. The images of the reference, if there are any, come last.

    Raises:
        RequestError: there are too few prompts, or a graph fails.
    """
    labels = prompts.labels
    count = len(labels) * num_seeds
    manifest = pipeline.bundle.manifest
    if len(labels) < MIN_PROMPTS:
        raise RequestError(field="prompts", found=str(len(labels)), expected=f"at least {MIN_PROMPTS} to compare")
    _try_graphs(
        features, agreement, make_blank_image(manifest.image_width, manifest.image_height), max(labels, key=len)
    )
    requests = list(prompts.requests(BATCH_SIZE, num_seeds, 0))
    turns = list(run_in_turns(pipeline, methods, requests, score=False, progress=progress, total=count))
    runs = {method.label: [turn[i] for turn in turns] for i, method in enumerate(methods)}
    compared = _differing_runs(pipeline, runs, requests, progress)
    drawn = compared if manifest.makes_images else {}
    images = {label: [image for run in method_runs for image in run.images] for label, method_runs in drawn.items()}
    figures = _figures_of_runs(list(compared.values()), num_seeds)
    if agreement is not None:
        figures["agreement"] = _agreement_figure(agreement, labels, num_seeds, images, progress)
    num_features = None
    if features is not None:
        sets = _read_features(features, images, progress)
        num_features = sets[0].shape[1]
        if real is None:
            images[REFERENCE] = _generate_reference(pipeline, methods[0], prompts, num_seeds, progress)
        reference = features(images[REFERENCE]) if real is None else real
        figures["frechet"] = frechet_figure(sets, reference, num_seeds, progress, paired=real is None)
    return {
        "prompts": labels,
        "seeds_per_prompt": num_seeds,
        "images_per_method": count,
        "features": None if features is None else {**features.facts, "num_features": num_features},
        "agreement": None if agreement is None else agreement.facts,
        "notes": _describe_run(len(labels), count, num_features, compared),
        "methods": _method_entries(runs, compared, figures, num_seeds),
    }, images


def _try_graphs(features: Features | None, agreement: Agreement | None, image: Image, prompt: str) -> None:
    """Run both graphs once, so that a graph that cannot run fails before images are generated."""
    if features is not None:
        features([image])
    if agreement is not None:
        agreement([image], [prompt])


def _read_features(features: Features, images: Mapping[str, list[Image]], progress: Progress) -> list[Floats]:
    sets: list[Floats] = []
    for method_images in images.values():
        progress("features", len(sets), len(images))
        sets.append(features(method_images))
    return sets


def _differing_runs(
    pipeline: Pipeline, runs: Mapping[str, list[Run]], requests: Sequence[dict[str, Any]], progress: Progress
) -> dict[str, list[Run]]:
    """Return the runs of plain decoding and of methods with other images, with likelihoods, by label."""
    plain, *_ = runs.values()
    compared = {
        label: method_runs
        for label, method_runs in runs.items()
        if method_runs is plain or not same_codes(method_runs, plain)
    }
    for number, (label, method_runs) in enumerate(compared.items()):
        progress("likelihoods", number, len(compared))
        compared[label] = [add_likelihoods(pipeline, *pair) for pair in zip(method_runs, requests, strict=True)]
    return compared


def _method_entries(
    runs: Mapping[str, list[Run]], compared: Mapping[str, list[Run]], figures: Mapping[str, Figure], num_seeds: int
) -> list[dict[str, Any]]:
    """Return the report of each method.

    Args:
        runs: runs by label, plain decoding first.
        compared: result of `_differing_runs`.
        figures: figures of the compared methods, in their order, by name.
        num_seeds: number of images per prompt.
    """
    plain, *_ = runs
    passes = estimate_mean([tokens_per_pass(method_runs) for method_runs in runs.values()], num_seeds)
    columns = {label: {name: figure[i] for name, figure in figures.items()} for i, label in enumerate(compared)}
    return [
        {
            "method": label,
            "settings": method_runs[-1].settings.as_dict(),
            "seconds": sum(run.seconds for run in method_runs),
            "exact": method_runs[-1].settings.method.exact,
            "same_images": label not in compared or label == plain,
            "tokens_per_forward_pass": speed["value"],
            "tokens_per_forward_pass_interval": {"low": speed["low"], "high": speed["high"]},
            "figures": columns.get(label),
        }
        for (label, method_runs), speed in zip(runs.items(), passes, strict=True)
    ]


def _generate_reference(
    pipeline: Pipeline, plain: ComparedMethod, prompts: Prompts, num_seeds: int, progress: Progress
) -> list[Image]:
    count = len(prompts.items) * num_seeds

    def report_reference(_: str, done: int, total: int) -> None:
        progress(f"images of {REFERENCE}", done, total)

    requests = prompts.requests(BATCH_SIZE, num_seeds, first_seed=count)
    turns = run_in_turns(pipeline, [plain], requests, score=False, progress=report_reference, total=count)
    return [image for (run,) in turns for image in run.images]


def same_codes(runs: Sequence[Run], plain: Sequence[Run]) -> bool:
    """Return whether an exact method generated the same codes as plain decoding."""
    return runs[0].settings.method.exact and np.array_equal(_stack_codes(runs), _stack_codes(plain))


def _stack_codes(runs: Sequence[Run]) -> Ints:
    return np.array([codes for run in runs for codes in run.codes])  # [images, cells]


def _agreement_figure(
    agreement: Agreement,
    labels: Sequence[str],
    num_seeds: int,
    images: Mapping[str, Sequence[Image]],
    progress: Progress,
) -> Figure:
    prompts = [label for label in labels for _ in range(num_seeds)]
    values: list[Floats] = []
    for method_images in images.values():
        progress("prompt agreement", len(values), len(images))
        values.append(agreement(method_images, prompts))
    return estimate_mean(values, num_seeds)


def _figures_of_runs(methods: Sequence[Sequence[Run]], num_seeds: int) -> dict[str, Figure]:
    scores = [[score for run in runs for score in run.likelihoods] for runs in methods]
    codes = np.stack([_stack_codes(runs) for runs in methods])  # [methods, images, cells]
    tvd = [
        [image.realised_tvd / codes.shape[2] for run in runs for image in run.statistics.per_image] for runs in methods
    ]
    return {
        "tokens_per_forward_pass": estimate_mean([tokens_per_pass(runs) for runs in methods], num_seeds),
        "tvd": estimate_mean(tvd, num_seeds),
        "same_tokens": estimate_mean(list((codes == codes[0]).mean(2)), num_seeds),
        "excess_nll": estimate_mean([[score.nats - score.entropy for score in row] for row in scores], num_seeds),
    }


def frechet_figure(
    sets: Sequence[Floats], reference: Floats, num_seeds: int, progress: Progress, paired: bool = True
) -> Figure:
    """Estimate the Frechet distance of every method's images to a reference.

    Args:
        sets: features `[prompts x num_seeds, width]` of every method.
        reference: features `[n, width]` of the reference images.
        num_seeds: number of images per prompt.
        paired: whether the reference has the same prompts and number of seeds, and is resampled with the methods.
    """
    by_prompt = np.arange(len(sets[0])).reshape(-1, num_seeds)
    whole = fit_gaussian(reference)
    resamples = _RESAMPLES_WIDE if min(reference.shape) >= _WIDE else RESAMPLES
    evaluated = 0

    def distances(sample: Ints) -> list[float]:
        nonlocal evaluated
        progress("Frechet distances", evaluated, resamples)
        evaluated += 1
        images = by_prompt[sample].ravel()
        target = fit_gaussian(reference[images]) if paired else whole
        return [frechet_distance(fit_gaussian(features[images]), target) for features in sets]

    return estimate_interval(distances, len(by_prompt), resamples, recenter=True)


def _describe_run(prompts: int, images: int, width: int | None, compared: Mapping[str, Sequence[Run]]) -> list[str]:
    """Return remarks on how far the figures can be trusted.

    Args:
        images: number of images per method.
        width: number of features per image, None without features.
        compared: runs by label.
    """
    notes = []
    if prompts < ENOUGH_PROMPTS:
        notes.append(f"{prompts} prompts: intervals from fewer than {ENOUGH_PROMPTS} prompts are too narrow.")
    if width is None:
        notes.append("No Frechet distance: the bundle has no vq_encoder and --features was not given.")
    elif images < IMAGES_PER_FEATURE * width:
        notes.append(
            f"{images} images for {width} features, expected at least {IMAGES_PER_FEATURE * width}: the Frechet "
            "distance of ar comes mostly from the small number of images and hides small differences."
        )
    notes += [
        f"{label}: TVD covers relaxed acceptance only; the deviation of this method is not measured."
        for label, runs in compared.items()
        if not runs[-1].settings.method.measures_distance
    ]
    return notes
