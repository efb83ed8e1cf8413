"""The `run` command: generates files of images, or of codes, from prompts.

All input is checked before the bundle's graphs are loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OutputError, RequestError
from ..inputs import check_int
from ..output.files import check_output_path, write_output
from ..output.formats import FORMATS, PNG, FinishedImage, Model, OutputFormat, find_format
from ..output.names import choose_output_paths
from ..subjects.table import WORDS, list_subjects
from .console import print_json, print_stderr, print_text, show_progress
from .options import (
    EDIT_INPUTS,
    OUTPUT,
    REQUEST_OPTIONS,
    SUBJECTS,
    EngineOptions,
    EnginesOption,
    ForceOption,
    JsonOption,
    ProviderOption,
    ThreadsOption,
    YesOption,
    add_request_options,
    download_published_model,
    split_arguments,
)

if TYPE_CHECKING:
    from ..bundle.files import Bundle
    from ..requests import Request
    from ..results import StreamStep

EXAMPLES = """
lantern-rt run "a large red sphere left of a small blue cube on grass at sunset"
lantern-rt run scenes "a green cone on snow" "a red cube" --count 4 --output cones/ --scale 4
lantern-rt run "a pink cube on sand" --method lantern++:lambda=3:tree=chain-4 --seed 7 --trace cube.npz
lantern-rt run --from a-pink-cube-on-sand-seed7.png --scale 4
lantern-rt run bundles/llamagen-b --class-id 207 --method lantern:delta=0.2 --json
lantern-rt run llamagen-c2i-b-256 --class-id 207 --yes
lantern-rt run "a red cube on sand" --codes --output cube.npz
"""

WordsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[BUNDLE] [PROMPT]...",
        help="Prompts, each in quotes. The first argument may instead be a bundle: its folder, the name of an "
        "embedded bundle or published model, or hf:owner/name[@revision]. [default: scenes, or that of --from]",
    ),
]
SourceOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="PNG",
        help="PNG written by lantern-rt, to generate again from the prompt, seed and settings that it records.",
        rich_help_panel=SUBJECTS,
    ),
]
OutputOption = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        help="File or folder to write; a new folder's parent must exist. A file's ending selects its format: "
        f"{', '.join(suffix[1:] for each in FORMATS for suffix in each.suffixes)}. "
        "[default: a name from prompt and seed, or PNG-again, in the current folder]",
        rich_help_panel=OUTPUT,
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(help="File NAME.npz to write all draft trees to.", rich_help_panel=OUTPUT),
]
CodesOption = Annotated[
    bool, typer.Option("--codes", help="Write .npz files of tokens instead of images.", rich_help_panel=OUTPUT)
]
ScaleOption = Annotated[
    int, typer.Option(help="Factor by which to enlarge images, 1 .. 16, bicubic.", rich_help_panel=OUTPUT)
]


@add_request_options("source", [name for name in REQUEST_OPTIONS if name not in EDIT_INPUTS])
def run(
    words: WordsArgument = None,
    source: SourceOption = None,
    output: OutputOption = None,
    trace: TraceOption = None,
    scale: ScaleOption = 1,
    codes: CodesOption = False,
    threads: ThreadsOption = None,
    engines: EnginesOption = None,
    provider: ProviderOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
    force: ForceOption = False,
    **options: Any,
) -> None:
    """Generate images from prompts, class ids, token ids or text embeddings.

    With --codes, or from a bundle without an image decoder, the command writes .npz files of tokens. Each file is
    written as soon as its image is complete. Images that exist already are not generated again. Prints the paths of the
    files to stdout, progress and a line of statistics to stderr.
    """
    from ..published import check_published_request, find_published_model, is_missing_from_cache
    from .replay import png_contains_image, read_recorded_request, read_replay_recipe

    options = {name: value for name, value in options.items() if value not in (None, [])}
    name, prompts = split_arguments(words or [], bool(source or list_subjects(options)))
    if prompts:
        options["prompts"] = [*prompts, *options.get("prompts", [])]
    values = options | {name: WORDS[name].option.read(options[name]) for name in options.keys() & WORDS.keys()}
    engine_options = EngineOptions(threads, engines, provider)
    if name is not None and (source or list_subjects(options)) and is_missing_from_cache(name):
        engine_options.check()
        formats = _list_formats(find_published_model(name), f"model {name}", codes, scale, trace)
        if source is None:
            stems = ["image"] * check_published_request(name, values)
            outputs = choose_output_paths(output, stems, force, lambda i, path: True, formats)
            _check_trace_path(trace, [path for path, _ in outputs], force)
        else:
            read_replay_recipe(source, options)
        download_published_model(name, yes)
    if source is None:
        bundle, request = _open_bundle_and_request(engine_options, name, values)
        stems = _make_file_stems(request, options)
    else:
        bundle, request = read_recorded_request(source, options, engine_options, name)
        stems = [f"{source.stem}-again"]
    formats = _list_formats(bundle.manifest, f"bundle {bundle.manifest.name}", codes, scale, trace)

    contains_image = partial(png_contains_image, bundle, request, scale)
    outputs = choose_output_paths(output, stems, force, contains_image, formats)
    paths = [path for path, _ in outputs]
    _check_trace_path(trace, paths, force)
    pending = [i for i, (_, done) in enumerate(outputs) if as_json or trace or not done]
    if len(pending) < len(paths):
        print_stderr(f"{len(paths) - len(pending)} of {len(paths)} images exist already; --force generates them again")
    if pending:
        request = replace(request, images=[request.images[i] for i in pending])
        files = [outputs[i] for i in pending]
        encode = partial(find_format(paths[0]).encode, scale=scale)
        last_step = _generate_images(engine_options, bundle, request, encode, files, trace, force)
    if as_json:
        _print_results_json(request, last_step, paths, options)
    else:
        print_text(*paths)


def _list_formats(
    model: Model, model_name: str, codes: bool, scale: int, trace_path: Path | None
) -> list[OutputFormat]:
    """Return the formats of which `--output` selects one, the default first, after a check of options for images."""
    check_int("scale", scale, 1, 1, 16)
    if not PNG.supports(model):
        problem = f"{model_name} has no image decoder"
        if trace_path is not None:
            raise RequestError(problem, field="trace", remedy="leave it out")
    elif codes:
        problem = "is for images, not for --codes"
    else:
        return [each for each in FORMATS if each.needs_image_decoder]
    if scale != 1:
        raise RequestError(problem, field="scale", remedy="leave it out")
    return [each for each in FORMATS if not each.needs_image_decoder]


def _check_trace_path(trace_path: Path | None, image_paths: list[Path], force: bool) -> None:
    """Check that the file of a trace can be written, and that it is not the path of an image."""
    if trace_path is None:
        return
    field = f"trace {trace_path}"
    if trace_path.suffix != ".npz":
        raise OutputError(field=field, found=f"the ending {trace_path.suffix or 'none'}", expected=".npz")
    check_output_path(trace_path, force)
    if trace_path.absolute() in [output.absolute() for output in image_paths]:
        raise OutputError("is the path of an image, too", field=field, remedy="give one of them another name")


def _print_results_json(request: Request, last_step: StreamStep, paths: list[Path], options: Mapping[str, Any]) -> None:
    images_per_prompt = options.get("num_images", 1)
    images = [
        {
            "codes": codes.tolist(),
            "seed": image.seed,
            image.subject.words.chunk: image.subject.name(i // images_per_prompt),
            "output": str(path),
        }
        for i, (image, codes, path) in enumerate(zip(request.images, last_step.codes, paths, strict=True))
    ]
    stats = {name: value for name, value in vars(last_step.stats).items() if name not in ("images", "per_image")}
    print_json({"images": images, "stats": stats})


def _open_bundle_and_request(
    engine_options: EngineOptions, bundle_name: str | None, request_options: dict[str, Any]
) -> tuple[Bundle, Request]:
    """Open the bundle (None: `scenes`), and check the request."""
    from ..requests import check_request, choose_random_seed
    from ..text.tokenizers import load_bundle_tokenizer

    if not list_subjects(request_options):
        actual = "nothing to generate" if bundle_name is None else f"bundle {bundle_name} and nothing to generate"
        raise RequestError(found=actual, remedy="give a prompt, --class-id or --embeddings, as the bundle requires")
    bundle = engine_options.open_bundle(bundle_name or "scenes")
    if "image" in request_options and bundle.manifest.source is None:
        problem = f"bundle {bundle.manifest.name} takes no source image"
        raise RequestError(problem, field="image", remedy="leave it out, or use `lantern-rt edit`")
    request_options = {"seed": choose_random_seed()} | request_options
    return bundle, check_request(bundle.manifest, load_bundle_tokenizer(bundle), request_options)


def _make_file_stems(request: Request, options: Mapping[str, Any]) -> list[str]:
    images_per_prompt = options.get("num_images", 1)
    option = options[request.images[0].subject.words.parameter]
    return [
        f"{image.subject.make_file_stem(i // images_per_prompt, option)}-seed{image.seed}"
        for i, image in enumerate(request.images)
    ]


def _generate_images(
    engine_options: EngineOptions,
    bundle: Bundle,
    request: Request,
    encode: Callable[[FinishedImage], bytes],
    planned_files: list[tuple[Path, bool]],
    trace_path: Path | None,
    force: bool,
) -> StreamStep:
    """Generate all images, write each as soon as it is complete, print statistics, and return the last step."""
    from ..output.trace import Trace
    from ..results import finish_image

    max_prompt_tokens = max(image.prefix.length for image in request.images)
    pipeline = engine_options.load_pipeline(bundle, request.settings, max_prompt_tokens=max_prompt_tokens)
    began = time.perf_counter()
    if not PNG.supports(bundle.manifest):
        print_stderr(f"bundle {bundle.manifest.name} has no image decoder: writing tokens")
    pending = dict(enumerate(planned_files))
    grid = request.settings.image_size
    trace = Trace(grid.rows, grid.columns)
    with show_progress(announce_tasks=False) as progress:
        for step in pipeline.decode(request):
            if trace_path is not None:
                trace.add_step(step)
            progress("tokens", step.done, step.total)
            for i in [i for i in pending if len(step.codes[i]) * len(planned_files) == step.total]:
                path, exists = pending.pop(i)
                if not exists:  # else the image was generated only for its tokens
                    image = finish_image(bundle, request.settings, request.images[i], step, i)
                    write_output(path, encode(image), force)
    if trace_path is not None:
        write_output(trace_path, trace.encode_npz(), force)
        print_stderr(f"trace: {trace_path}")
    assert step.stats is not None
    quality = "" if step.settings.quality is None else f" ({step.settings.quality})"
    print_stderr(
        f"{step.settings.method}{quality}: {step.stats.tokens_per_forward_pass:.2f} tokens per pass, "
        f"{len(planned_files)} image{'s' * (len(planned_files) > 1)} in {time.perf_counter() - began:.1f} s, "
        f"seed {request.images[0].seed}"
    )
    return step
