"""The `run` command: generates PNG files, or files of codes, from prompts.

All input is checked before a graph is loaded.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OutputError, RequestError
from ..inputs import check_int, convert_read_errors, format_value, read_plain_file
from ..output.files import check_output
from ..output.names import make_slug, plan_outputs
from .console import print_json, print_stderr, print_text, show_progress
from .options import (
    OUTPUT,
    SUBJECTS,
    EmbeddingsOption,
    EngineOptions,
    EnginesOption,
    ExportOption,
    ForceOption,
    JsonOption,
    ProviderOption,
    ThreadsOption,
    YesOption,
    download_published,
    with_request_options,
)
from .outputs import check_image_options, choose_outputs

if TYPE_CHECKING:
    from ..bundle.files import Bundle
    from ..prompts import ImageRequest
    from ..requests import Request
    from ..results import StreamStep
    from .outputs import Outputs

_MAX_ID_BYTES = 1 << 24  # maximum size of a file of token ids
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
PromptOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="Prompt, as an alternative to arguments; may be given several times.",
        rich_help_panel=SUBJECTS,
    ),
]
ClassIdOption = Annotated[
    list[int] | None,
    typer.Option(
        metavar="ID",
        help="Class id, for class-conditional bundles; may be given several times.",
        rich_help_panel=SUBJECTS,
    ),
]
TokenIdsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="JSON",
        help="File of a prompt as token ids, such as [1, 2, 3], or of a list of prompts.",
        rich_help_panel=SUBJECTS,
    ),
]
ImageOption = Annotated[
    Path | None,
    typer.Option(metavar="IMAGE", help="Source image, for models that take one.", rich_help_panel=SUBJECTS),
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
        help="File or folder to write; a new folder's parent must exist. "
        "[default: a name from prompt and seed, or PNG-again, in the current folder]",
        rich_help_panel=OUTPUT,
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        help="File NAME.npz to write all draft trees to; an image of them goes to NAME.trace.png.",
        rich_help_panel=OUTPUT,
    ),
]
CodesOption = Annotated[
    bool, typer.Option("--codes", help="Write .npz files of tokens instead of images.", rich_help_panel=OUTPUT)
]
ScaleOption = Annotated[
    int, typer.Option(help="Factor by which to enlarge the PNG, 1 .. 16, bicubic.", rich_help_panel=OUTPUT)
]


@with_request_options
def run(
    words: WordsArgument = None,
    prompt: PromptOption = None,
    class_id: ClassIdOption = None,
    token_ids: TokenIdsOption = None,
    embeddings: EmbeddingsOption = None,
    image: ImageOption = None,
    source: SourceOption = None,
    output: OutputOption = None,
    trace: TraceOption = None,
    scale: ScaleOption = 1,
    codes: CodesOption = False,
    threads: ThreadsOption = None,
    engines: EnginesOption = None,
    provider: ProviderOption = None,
    yes: YesOption = False,
    export: ExportOption = False,
    as_json: JsonOption = False,
    force: ForceOption = False,
    **options: Any,
) -> None:
    """Generate PNG images from prompts, class ids, token ids or text embeddings.

    With --codes, and from a bundle without an image decoder, it writes .npz files of tokens. Each file is
    written as soon as its image is complete.
    Images that exist already are not generated again. Prints the paths of the files to stdout, progress and a line of
    statistics to stderr.
    """
    from ..published import find_model, is_missing
    from .before_download import check_run
    from .replay import check_recorded, read_recorded_request

    check_int("scale", scale, 1, 1, 16)
    name, prompts = _split_words(words or [], has_subject=bool(prompt or class_id or token_ids or embeddings or source))
    subjects: dict[str, Any] = {"class_ids": class_id or None, "token_ids": token_ids, "embeddings": embeddings}
    subjects["prompts"] = [*prompts, *(prompt or [])] or None
    options = {name: value for name, value in (subjects | options | {"image": image}).items() if value is not None}
    count = options.get("num_images", 1)
    engine = EngineOptions(threads, engines, provider)
    if name is not None and (source or any(subjects.values())) and is_missing(name):
        engine.check()
        kind_of = check_image_options(find_model(name).makes_images, f"model {name}", codes, scale, trace)
        if source is None:
            check_trace(trace, check_run(name, options, output, force, kind_of.suffix), force)
        else:
            check_recorded(source, options)
        download_published(name, yes, export)
    if source is None:
        bundle, request = _open_and_check(engine, name, options)
        stems = [_file_stem(image, i // count, embeddings) for i, image in enumerate(request.images)]
    else:
        bundle, request = read_recorded_request(source, options, engine, name)
        stems = [f"{source.stem}-again"]
    kind = choose_outputs(bundle, codes, scale, trace)
    outputs = plan_outputs(output, stems, force, lambda i, path: kind.holds(path, request, i), kind.suffix)
    paths = [path for path, _ in outputs]
    trace_paths = check_trace(trace, paths, force)
    pending = [i for i, (_, done) in enumerate(outputs) if as_json or trace or not done]
    if len(pending) < len(paths):
        print_stderr(f"{len(paths) - len(pending)} of {len(paths)} images exist already; --force generates them again")
    if pending:
        request = replace(request, images=[request.images[i] for i in pending])
        last = _generate_images(engine, bundle, request, kind, [outputs[i] for i in pending], trace_paths, force)
    if as_json:
        _print_json(request, last, paths, count)
    else:
        print_text(*paths)


def check_trace(path: Path | None, outputs: list[Path], force: bool) -> tuple[Path, Path] | None:
    """Return the two paths of a trace.

    Args:
        path: path of NAME.npz; None: no trace.
        outputs: paths of the images; the trace needs other paths.
        force: whether to replace existing files.

    Raises:
        OutputError: a path cannot be written.
    """
    if path is None:
        return None
    if path.suffix != ".npz":
        raise OutputError(field=f"trace {path}", found=f"the ending {path.suffix or 'none'}", expected=".npz")
    paths = path, path.with_name(path.stem.removesuffix(".trace") + ".trace.png")
    for written in paths:
        check_output(written, force)
        if written.absolute() in [output.absolute() for output in outputs]:
            problem = "is the path of an image and of the trace"
            raise OutputError(problem, field=str(written), remedy="rename one of them")
    return paths


def _print_json(request: Request, last: StreamStep, paths: list[Path], count: int) -> None:
    images = [
        {"codes": codes.tolist(), "seed": image.seed, **_label_field(image, i // count), "output": str(path)}
        for i, (image, codes, path) in enumerate(zip(request.images, last.codes, paths, strict=True))
    ]
    stats = {name: value for name, value in vars(last.stats).items() if name not in ("images", "per_image")}
    print_json({"images": images, "stats": stats})


def _split_words(words: list[str], has_subject: bool) -> tuple[str | None, list[str]]:
    """Split the arguments into the bundle, if the first argument is a bundle, and the prompts.

    A single word beside an option such as --class-id is a bundle, whether the bundle exists or not.

    Raises:
        RequestError: a prompt is not in quotes, or a bundle is misspelt.
    """
    bundle = None
    if words and (_is_bundle(words[0]) or (has_subject and " " not in words[0].strip())):
        bundle, *words = words
    single = [word for word in words if " " not in word.strip()]
    if len(words) > 1 and single:
        actual = f"the single word {format_value(single[0])} among {len(words)}"
        expected = "a bundle's folder or name, then prompts in quotes"
        raise RequestError(field="prompt", found=actual, expected=expected)
    return bundle, words


def _is_bundle(word: str) -> bool:
    from ..bundle.files import MANIFEST_FILE, list_embedded_names
    from ..bundle.hub import HUB
    from ..published import published_models

    with suppress(OSError, ValueError):  # too long for a path
        return (
            word in list_embedded_names()
            or word in published_models()
            or word.startswith(HUB)
            or (word != "" and (Path(word) / MANIFEST_FILE).is_file())
        )
    return False


def _open_and_check(engine: EngineOptions, name: str | None, options: dict[str, Any]) -> tuple[Bundle, Request]:
    """Open the bundle and check the request. Raises: RequestError, BundleError."""
    from ..prompts import load_bundle_tokenizer
    from ..requests import check_request, draw_seed
    from ..text.embeddings import read_embeddings

    if not {"prompts", "class_ids", "token_ids", "embeddings"} & options.keys():
        actual = "nothing to generate" if name is None else f"bundle {name} and nothing to generate"
        raise RequestError(found=actual, remedy="give a prompt, --class-id or --embeddings, as the bundle requires")
    if "token_ids" in options:
        options = options | {"token_ids": _read_token_ids(options["token_ids"])}
    if "embeddings" in options:
        options = options | {"embeddings": read_embeddings(options["embeddings"])}
    bundle = engine.open_bundle(name or "scenes")
    if "image" in options and bundle.manifest.source is None:
        problem = f"bundle {bundle.manifest.name} takes no source image"
        raise RequestError(problem, field="image", remedy="leave it out; `lantern-rt edit` changes a part of an image")
    options = {"seed": draw_seed()} | options
    return bundle, check_request(bundle.manifest, load_bundle_tokenizer(bundle), **options)


def _read_token_ids(path: Path) -> Any:
    with convert_read_errors(path, "a JSON list of token ids", RequestError, "write it as [1, 2, 3]"):
        ids = json.loads(read_plain_file(path, _MAX_ID_BYTES))
        if not isinstance(ids, list):
            raise ValueError(format_value(ids))
        return ids


def _label_field(image: ImageRequest, number: int) -> dict[str, Any]:
    if image.label is None:
        return {"embedding": number}
    if isinstance(image.label, tuple):
        return {"token_ids": image.label}
    return {"prompt" if isinstance(image.label, str) else "class_id": image.label}


def _file_stem(image: ImageRequest, number: int, embeddings: Path | None) -> str:
    if isinstance(image.label, str):
        return f"{make_slug(image.label)}-seed{image.seed}"
    if isinstance(image.label, tuple):
        return f"tokens-{number}-seed{image.seed}"
    if embeddings is None:
        return f"class-{image.label}-seed{image.seed}"
    return f"{make_slug(embeddings.stem)}-{number}-seed{image.seed}"


def _generate_images(
    engine: EngineOptions,
    bundle: Bundle,
    request: Request,
    kind: Outputs,
    outputs: list[tuple[Path, bool]],
    trace_paths: tuple[Path, Path] | None,
    force: bool,
) -> StreamStep:
    """Generate all images, write each file as soon as its image is complete, and print a line of statistics.

    Args:
        engine: options that load the bundle's graphs.
        outputs: path of each image, and whether the file exists with this image and is not to be written.
        trace_paths: paths of a trace, from `check_trace`; None: no trace.
        force: whether to replace existing files.

    Returns:
        The last step.
    """
    from ..output.files import write_output

    prefix = max(len(real) for image in request.images for real in image.is_real)
    pipeline = engine.load(bundle, request.settings, prefix=prefix)
    began = time.perf_counter()
    if not bundle.manifest.makes_images:
        print_stderr(f"bundle {bundle.manifest.name} has no image decoder: writing tokens")
    pending = dict(enumerate(outputs))
    trace = None if trace_paths is None else _TraceFiles(trace_paths, bundle, request)
    with show_progress(lines=False) as progress:
        for step in pipeline.decode(request):
            if trace is not None:
                trace.steps.add(step)
            progress("tokens", step.done, step.total)
            for i in [i for i in pending if len(step.codes[i]) * len(outputs) == step.total]:
                path, exists = pending.pop(i)
                if not exists:  # else the image was generated only for its tokens
                    write_output(path, kind.content(request, i, step), force)
    if trace is not None:
        trace.write(force)
    assert step.stats is not None
    quality = "" if step.settings.quality is None else f" ({step.settings.quality})"
    print_stderr(
        f"{step.settings.method}{quality}: {step.stats.tokens_per_forward_pass:.2f} tokens per pass, "
        f"{len(outputs)} image{'s' * (len(outputs) > 1)} in {time.perf_counter() - began:.1f} s, "
        f"seed {request.images[0].seed}"
    )
    return step


class _TraceFiles:
    """Files of a trace: the steps in NAME.npz, and an image of them in NAME.trace.png.

    Args:
        paths: paths of both files, from `check_trace`.
        bundle: bundle that generates the images.
        request: request whose steps are recorded.
    """

    def __init__(self, paths: tuple[Path, Path], bundle: Bundle, request: Request) -> None:
        from ..output.trace import Trace

        self.paths = paths
        grid = bundle.manifest.size(request.settings.size)
        self.steps = Trace(grid.rows, grid.columns)

    def write(self, force: bool) -> None:
        """Write both files."""
        from ..output.files import write_output
        from ..output.images import encode_png

        path, image_path = self.paths
        write_output(path, self.steps.encode_npz(), force)
        write_output(image_path, encode_png(self.steps.render(), {}), force)
        print_stderr(f"trace: {path} and {image_path}")
