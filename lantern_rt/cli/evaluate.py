"""The `eval` command: compares the images of decoding methods, and writes a report and presets."""

from __future__ import annotations

import datetime
import itertools
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bundle.files import Bundle
from ..bundle.manifest import Manifest, Preset
from ..bundle.rewrite import check_bundle_writable
from ..bundle.rewrite import write_presets as write_into_bundle
from ..compare.evaluate import evaluate_methods
from ..compare.image_graph import (
    EncoderFeatureModel,
    ImageFeatureModel,
    PromptAgreementModel,
    compute_folder_features,
    read_preprocessing,
)
from ..compare.presets import choose_presets, list_candidate_methods
from ..compare.prompts import MAX_FIRST_SEED, Prompts, read_bundle_prompts
from ..compare.report import format_html_report, format_text_report
from ..compare.statistics import Floats
from ..compare.turns import parse_methods
from ..completion import parse_method
from ..engines.doctor import make_host_report
from ..engines.host import count_usable_cores
from ..errors import RequestError
from ..inputs import check_int
from ..methods import BUILT_IN_METHODS, METHODS, SAMPLING, Quality
from ..output.files import check_new_folder, write_folder_atomically
from ..output.names import make_slug
from ..output.tables import format_csv_table
from ..pipeline import Pipeline
from ..subjects.prompts import Text
from .bench import describe_pipeline
from .console import print_text, show_progress
from .options import (
    BundleArgument,
    EngineOptions,
    EnginesOption,
    FirstSeedOption,
    MethodsOption,
    PromptsOption,
    ProviderOption,
    QualitiesOption,
    ThreadsOption,
    add_request_options,
)

EXAMPLES = """
lantern-rt eval scenes --method sjd:lambda=2 --method lantern++:lambda=3:tree=chain-4 --count 64
lantern-rt eval bundles/t2i --prompts captions.txt --features inception/model.onnx --agreement clip/model.onnx
lantern-rt eval bundles/t2i --prompts captions.txt --agreement clip/model.onnx --write-presets
"""
_RESULT = "eval.json"

CountOption = Annotated[
    int | None,
    typer.Option(help="Number of images per method. [default: one per prompt]"),
]
FeaturesOption = Annotated[
    Path | None,
    typer.Option(
        help="ONNX graph that computes features of images, such as Inception. [default: the bundle's VQ encoder]"
    ),
]
ReferenceOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder of real images for Frechet distances, which are FID if --features is Inception. "
        "[default: images of ar with other seeds]"
    ),
]
AgreementOption = Annotated[
    Path | None,
    typer.Option(
        help="ONNX graph that scores the agreement of images and prompts, such as CLIP, with its tokenizer.json in "
        "the same folder. [default: none]"
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(help="New folder for report.html, eval.json and eval.csv. [default: eval-NAME in the current folder]"),
]
WritePresetsOption = Annotated[
    bool,
    typer.Option(
        "--write-presets",
        help="Store the fastest method within each quality's limits (strict, balanced, fast) in the bundle.",
    ),
]


@add_request_options("features", SAMPLING)
def evaluate(
    bundle: BundleArgument = "scenes",
    method: MethodsOption = None,
    quality: QualitiesOption = None,
    prompts: PromptsOption = None,
    count: CountOption = None,
    seed: FirstSeedOption = 0,
    features: FeaturesOption = None,
    reference: ReferenceOption = None,
    agreement: AgreementOption = None,
    output: OutputOption = None,
    write_presets: WritePresetsOption = False,
    threads: ThreadsOption = None,
    engines: EnginesOption = None,
    provider: ProviderOption = None,
    **sampling: Any,
) -> None:
    """Compare the images of decoding methods with images of plain decoding (ar), on the same prompts and seeds.

    Without --method and --quality, several degrees of relaxed acceptance are compared. If the folder of an ONNX graph
    has a preprocessor_config.json, images are prepared for the graph as this file says. Needs lantern-rt[cpu].
    """
    changed = next((name for name, value in sampling.items() if value is not None), None)
    if write_presets and changed is not None:
        problem = "presets need the bundle's sampling settings"
        raise RequestError(problem, field=changed, remedy="omit it or --write-presets")
    check_int("seed", seed, 0, 0, MAX_FIRST_SEED)
    options = EngineOptions(threads, engines, provider)
    opened = options.open_bundle(bundle)
    manifest = opened.manifest
    if write_presets:
        check_bundle_writable(opened)
    output = output or _choose_new_folder(f"eval-{make_slug(manifest.name)}")
    check_new_folder(output, False, _RESULT)
    labels = method or ([] if quality else list_candidate_methods(manifest))
    methods = parse_methods(labels, sampling, opened, quality or ())
    if write_presets:
        _check_built_in(labels)
    prompt_set = read_bundle_prompts(opened, prompts, count)
    seeds = -(-(count or 1) // len(prompt_set.items))
    if features is not None or agreement is not None or reference is not None:
        opened.check_has_image_decoder()
    feature_graph = _open_feature_model(features, opened, threads)
    agreement_graph = None if agreement is None else _open_agreement_model(agreement, prompt_set, opened, threads)
    reference_features = None if reference is None else _compute_reference_features(reference, feature_graph, manifest)
    pipeline = options.load_pipeline(opened)
    with show_progress() as progress:
        report, images = evaluate_methods(
            pipeline, prompt_set, seeds, methods, progress, feature_graph, agreement_graph, reference_features, seed
        )
    facts = _describe_evaluation(pipeline)
    facts["reference"] = "ar, other seeds"
    if reference_features is not None:
        facts["reference"] = f"{reference}, {len(reference_features)} images"
    page = format_html_report(report, images, facts, f"{manifest.name}: decoding methods compared")
    with write_folder_atomically(output, False, _RESULT) as folder:
        (folder / _RESULT).write_text(dumps({**facts, **report}, indent=1, allow_nan=False) + "\n", "utf-8")
        (folder / "report.html").write_text(page, "utf-8")
        (folder / "eval.csv").write_text(format_csv_table(report["methods"]), "utf-8")
    print_text(format_text_report(report, reference is not None), output / _RESULT, output / "report.html")
    if write_presets:
        _write_presets(opened, choose_presets(report, manifest))


def _check_built_in(methods: list[str]) -> None:
    for method in methods:
        if METHODS[parse_method(method)[0]] not in BUILT_IN_METHODS:
            problem = "is registered in this process only, so it cannot be a preset"
            raise RequestError(problem, field=f"method {method}", remedy="omit it, or --write-presets")


def _open_feature_model(path: Path | None, bundle: Bundle, threads: int | None) -> ImageFeatureModel | None:
    """Open the ONNX graph that computes image features; None: the bundle's VQ encoder, if it has one."""
    if path is not None:
        return ImageFeatureModel(path, read_preprocessing(path), threads)
    return EncoderFeatureModel(bundle, threads) if bundle.manifest.can_edit_images else None


def _open_agreement_model(path: Path, prompts: Prompts, bundle: Bundle, threads: int | None) -> PromptAgreementModel:
    if prompts.kind is not Text:
        problem = f"bundle {bundle.manifest.name} takes {prompts.kind.words.parameter}, not prompts"
        raise RequestError(problem, field="agreement", remedy="leave it out")
    return PromptAgreementModel(path, read_preprocessing(path), bundle, threads)


def _compute_reference_features(folder: Path, feature_graph: ImageFeatureModel | None, manifest: Manifest) -> Floats:
    if feature_graph is None:
        raise RequestError("no features to compare", field="reference", remedy="give --features")
    with show_progress(announce_tasks=False) as progress:
        return compute_folder_features(feature_graph, folder, (manifest.image_width, manifest.image_height), progress)


def _choose_new_folder(name: str) -> Path:
    folders = (Path(name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return next(folder for folder in folders if not folder.exists())


def _write_presets(bundle: Bundle, presets: dict[Quality, Preset]) -> None:
    if not presets:
        print_text("no method meets the limits of a quality; the bundle is unchanged")
        return
    changed = write_into_bundle(bundle, presets)
    for quality, preset in presets.items():
        figures = preset.figures
        assert figures is not None
        agreement = "" if figures.agreement is None else f", {figures.agreement:+.1f} points of agreement"
        gain = f"{figures.tokens_per_pass:.2f} tokens per pass, {figures.excess_nll:+.3f} nats per token{agreement}"
        print_text(f"{quality}: {preset.method}", f"  {gain}")
    print_text(
        f"bundle {changed.manifest.name} was {bundle.digest[:12]}, is {changed.digest[:12]}: "
        "build its engine folders again"
    )


def _describe_evaluation(pipeline: Pipeline) -> dict[str, str]:
    host = make_host_report().facts
    return {
        **{name: str(value) for name, value in describe_pipeline(pipeline).items()},
        "host": f"{host['system']}, {count_usable_cores()} cores",
        "onnxruntime": host["onnxruntime"],
        "date": datetime.date.today().isoformat(),
    }
