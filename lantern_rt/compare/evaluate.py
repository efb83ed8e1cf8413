"""Evaluation of the images of decoding methods against plain decoding, on the same prompts and seeds.

Metrics that compare sets of images need a reference set, which plain decoding generates with other seeds. The images of
plain decoding are also compared with the reference set. This distance is the floor: smaller differences between methods
cannot be measured.

All exact methods generate the same image for a seed, except for rounding. If the tokens are equal, only the number of
forward passes is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL.Image import Image

from ..engines.contracts import Progress
from ..errors import RequestError
from ..output.images import make_blank_image
from ..pipeline import Pipeline
from .image_graph import ImageFeatureModel, PromptAgreementModel
from .prompts import Prompts
from .statistics import (
    RESAMPLES,
    Floats,
    Ints,
    MethodEstimates,
    compute_frechet_distance,
    estimate_interval,
    estimate_mean,
    fit_gaussian,
)
from .turns import ComparedMethod, MethodRun, add_likelihoods, run_methods_in_turns, tokens_per_pass

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
    feature_model: ImageFeatureModel | None = None,
    agreement_model: PromptAgreementModel | None = None,
    real_features: Floats | None = None,
    first_seed: int = 0,
) -> tuple[dict[str, Any], dict[str, list[Image]]]:
    """Generate images with all methods, plain decoding first, and compare them with plain decoding.

    Image n of every method has seed `first_seed` + n. Without a `feature_model`, the report has no Frechet distances,
    and without an `agreement_model` no agreement. Without `real_features [n, width]`, plain decoding generates the
    reference set.

    Returns:
        The report as a JSON object, and lists of images by method label: of plain decoding, of every method with other
        images, and last of the reference set if it was generated. Without an image decoder there are no lists.
    """
    labels = prompts.labels
    count = len(labels) * num_seeds
    manifest = pipeline.bundle.manifest
    if len(labels) < MIN_PROMPTS:
        raise RequestError(field="prompts", found=str(len(labels)), expected=f"at least {MIN_PROMPTS} to compare")
    blank = make_blank_image(manifest.image_width, manifest.image_height)
    if feature_model is not None:  # a graph that cannot run raises an error now
        feature_model([blank])
    if agreement_model is not None:
        agreement_model([blank], [max(labels, key=len)])
    requests = list(prompts.requests(BATCH_SIZE, num_seeds, first_seed))
    turns = list(
        run_methods_in_turns(pipeline, methods, requests, with_likelihoods=False, progress=progress, total_images=count)
    )
    runs_by_method = {method.label: [turn[i] for turn in turns] for i, method in enumerate(methods)}
    compared_runs = _score_differing_runs(pipeline, runs_by_method, requests, progress)
    pictured = compared_runs if manifest.makes_images else {}
    images = {label: [image for run in method_runs for image in run.images] for label, method_runs in pictured.items()}
    metrics = _estimate_metrics(list(compared_runs.values()), num_seeds)
    if agreement_model is not None:
        prompt_of_image = [label for label in labels for _ in range(num_seeds)]
        scores = _map_images(images, "prompt agreement", lambda sets: agreement_model(sets, prompt_of_image), progress)
        metrics["agreement"] = estimate_mean(scores, num_seeds)
    num_features = None
    if feature_model is not None:
        sets = _map_images(images, "features", feature_model, progress)
        num_features = sets[0].shape[1]
        if real_features is None:
            reference_seed = first_seed + count
            images[REFERENCE] = _generate_reference_images(
                pipeline, methods[0], prompts, num_seeds, reference_seed, progress
            )
        reference = feature_model(images[REFERENCE]) if real_features is None else real_features
        metrics["frechet"] = estimate_frechet_distances(
            sets, reference, num_seeds, progress, paired_reference=real_features is None
        )
    return {
        "prompts": labels,
        "seeds_per_prompt": num_seeds,
        "images_per_method": count,
        "features": None if feature_model is None else {**feature_model.facts, "num_features": num_features},
        "agreement": None if agreement_model is None else agreement_model.facts,
        "notes": _make_reliability_notes(len(labels), count, num_features, compared_runs),
        "methods": _make_method_reports(runs_by_method, compared_runs, metrics, num_seeds),
    }, images


def _map_images(
    images: Mapping[str, list[Image]], task: str, model: Callable[[list[Image]], Floats], progress: Progress
) -> list[Floats]:
    results: list[Floats] = []
    for method_images in images.values():
        progress(task, len(results), len(images))
        results.append(model(method_images))
    return results


def _score_differing_runs(
    pipeline: Pipeline,
    runs_by_method: Mapping[str, list[MethodRun]],
    requests: Sequence[dict[str, Any]],
    progress: Progress,
) -> dict[str, list[MethodRun]]:
    """Return the runs of plain decoding and of methods with other images, by label, with likelihoods."""
    baseline_runs, *_ = runs_by_method.values()
    compared_runs = {
        label: method_runs
        for label, method_runs in runs_by_method.items()
        if method_runs is baseline_runs or not has_same_codes(method_runs, baseline_runs)
    }
    for number, (label, method_runs) in enumerate(compared_runs.items()):
        progress("likelihoods", number, len(compared_runs))
        compared_runs[label] = [add_likelihoods(pipeline, *pair) for pair in zip(method_runs, requests, strict=True)]
    return compared_runs


def _make_method_reports(
    runs_by_method: Mapping[str, list[MethodRun]],
    compared_runs: Mapping[str, list[MethodRun]],
    metrics: Mapping[str, MethodEstimates],
    num_seeds: int,
) -> list[dict[str, Any]]:
    """Return the report of each method, plain decoding first. `metrics` are of the methods in `compared_runs`."""
    plain, *_ = runs_by_method
    passes = estimate_mean([tokens_per_pass(method_runs) for method_runs in runs_by_method.values()], num_seeds)
    columns = {label: {name: metric[i] for name, metric in metrics.items()} for i, label in enumerate(compared_runs)}
    return [
        {
            "method": label,
            "settings": method_runs[-1].settings.as_dict(),
            "seconds": sum(run.seconds for run in method_runs),
            "exact": method_runs[-1].settings.method.exact,
            "same_images": label not in compared_runs or label == plain,
            "tokens_per_forward_pass": speed["value"],
            "tokens_per_forward_pass_interval": {"low": speed["low"], "high": speed["high"]},
            "figures": columns.get(label),
        }
        for (label, method_runs), speed in zip(runs_by_method.items(), passes, strict=True)
    ]


def _generate_reference_images(
    pipeline: Pipeline,
    baseline_method: ComparedMethod,
    prompts: Prompts,
    num_seeds: int,
    first_seed: int,
    progress: Progress,
) -> list[Image]:
    turns = run_methods_in_turns(
        pipeline,
        [baseline_method],
        prompts.requests(BATCH_SIZE, num_seeds, first_seed),
        with_likelihoods=False,
        progress=lambda _, done, total: progress(f"images of {REFERENCE}", done, total),
        total_images=len(prompts.items) * num_seeds,
    )
    return [image for (run,) in turns for image in run.images]


def has_same_codes(runs: Sequence[MethodRun], baseline_runs: Sequence[MethodRun]) -> bool:
    return runs[0].settings.method.exact and np.array_equal(_stack_codes(runs), _stack_codes(baseline_runs))


def _stack_codes(runs: Sequence[MethodRun]) -> Ints:
    return np.array([codes for run in runs for codes in run.codes])  # [images, cells]


def _estimate_metrics(runs_by_method: Sequence[Sequence[MethodRun]], num_seeds: int) -> dict[str, MethodEstimates]:
    """Return the estimates of all methods for each metric that needs no graph, by name of the metric."""
    scores = [[score for run in runs for score in run.likelihoods] for runs in runs_by_method]
    codes = np.stack([_stack_codes(runs) for runs in runs_by_method])  # [methods, images, cells]
    tvd = [
        [image.realised_tvd / codes.shape[2] for run in runs for image in run.statistics.per_image]
        for runs in runs_by_method
    ]
    return {
        "tokens_per_forward_pass": estimate_mean([tokens_per_pass(runs) for runs in runs_by_method], num_seeds),
        "tvd": estimate_mean(tvd, num_seeds),
        "same_tokens": estimate_mean(list((codes == codes[0]).mean(2)), num_seeds),
        "excess_nll": estimate_mean([[score.nats - score.entropy for score in row] for row in scores], num_seeds),
    }


def estimate_frechet_distances(
    feature_sets: Sequence[Floats],
    reference_features: Floats,
    num_seeds: int,
    progress: Progress,
    paired_reference: bool = True,
) -> MethodEstimates:
    """Estimate the Frechet distance of every method's images to a reference, by their features.

    Features are `[prompts x num_seeds, width]` for every method. A `paired_reference`, which has the same prompts and
    number of seeds, is resampled together with the methods.
    """
    by_prompt = np.arange(len(feature_sets[0])).reshape(-1, num_seeds)
    whole = fit_gaussian(reference_features)
    resamples = _RESAMPLES_WIDE if min(reference_features.shape) >= _WIDE else RESAMPLES
    evaluated = 0

    def compute_distances(prompt_indices: Ints) -> list[float]:
        nonlocal evaluated
        progress("Frechet distances", evaluated, resamples)
        evaluated += 1
        images = by_prompt[prompt_indices].ravel()
        target = fit_gaussian(reference_features[images]) if paired_reference else whole
        return [compute_frechet_distance(fit_gaussian(features[images]), target) for features in feature_sets]

    return estimate_interval(compute_distances, len(by_prompt), resamples, correct_bias=True)


def _make_reliability_notes(
    num_prompts: int, num_images: int, num_features: int | None, compared_runs: Mapping[str, Sequence[MethodRun]]
) -> list[str]:
    """Return remarks about the reliability of the metrics, for example that there are too few prompts."""
    notes = []
    if num_prompts < ENOUGH_PROMPTS:
        notes.append(f"{num_prompts} prompts: intervals from fewer than {ENOUGH_PROMPTS} prompts are too narrow.")
    if num_features is None:
        notes.append("No Frechet distance: the bundle has no vq_encoder and --features was not given.")
    elif num_images < IMAGES_PER_FEATURE * num_features:
        min_images = IMAGES_PER_FEATURE * num_features
        notes.append(
            f"{num_images} images for {num_features} features, expected at least {min_images}: the Frechet distance of "
            "ar comes mostly from the small number of images and hides small differences."
        )
    notes += [
        f"{label}: TVD covers relaxed acceptance only; the deviation of this method is not measured."
        for label, runs in compared_runs.items()
        if not runs[-1].settings.method.measures_tvd
    ]
    return notes
