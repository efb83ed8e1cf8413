"""Options that several commands share, and functions that open bundles and pipelines from them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engines.ort.providers import DEFAULT_PROVIDER, ProviderChoice
from ..errors import RequestError
from ..inputs import format_value
from ..methods import METHODS, SAMPLING, SettableByRequest
from ..subjects.base import Option
from ..subjects.table import WORDS

if TYPE_CHECKING:
    from ..bundle.files import Bundle
    from ..engines.engine_folder import EngineFolder
    from ..pipeline import Pipeline
    from ..requests import GenerationSettings

# Sections in help.
SUBJECTS = "What to generate"
OUTPUT = "Output"
METHOD = "Method"
ENGINE = "Engine"
_METHOD_METAVAR = "NAME[:PARAMETER=VALUE]..."

BundleArgument = Annotated[
    str,
    typer.Argument(help="Bundle folder, name of an embedded bundle or published model, or hf:owner/name[@revision]."),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        help="Text file with one prompt per line. [default: example prompts of the bundle]",
        rich_help_panel=SUBJECTS,
    ),
]
MethodsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar=_METHOD_METAVAR,
        help="Decoding method, such as sjd:window=5; may be given several times.",
        rich_help_panel=METHOD,
    ),
]
QualitiesOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Preset of the bundle: strict, balanced or fast; may be given several times.",
        rich_help_panel=METHOD,
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(help="Number of threads for decoding. [default: one per core]", rich_help_panel=ENGINE),
]
EnginesOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder of TensorRT engines that build-engine made from this bundle, to use instead of its graphs.",
        rich_help_panel=ENGINE,
    ),
]
ProviderOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[GRAPH=]NAME",
        help="Execution provider of ONNX Runtime: cpu, cuda, webgpu, openvino, ... (docs/gpu.md). May be given again "
        "for single graphs, such as drafter=cpu. [default: auto, a GPU if there is one, else the CPU]",
        rich_help_panel=ENGINE,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, and nothing else.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Download a published model without asking.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]


FirstSeedOption = Annotated[int, typer.Option(help="Seed of the first image; further images have the next seeds.")]


def _make_option(
    value_type: Any, help_text: str, *names: str, metavar: str | None = None, section: str = SUBJECTS
) -> Any:
    return Annotated[value_type | None, typer.Option(*names, metavar=metavar, help=help_text, rich_help_panel=section)]


def _make_input_option(option: Option) -> Any:
    return _make_option(option.type, option.help, f"--{option.name.replace('_', '-')}", metavar=option.metavar)


def _make_sampling_option(name: str) -> Any:
    field = SAMPLING[name]
    value_type = next((kind for kind in (int, float) if field.annotation in (kind, kind | None)), str)
    (metavar,) = (mark.metavar for mark in field.metadata if isinstance(mark, SettableByRequest))
    help_text = f"{field.description} [default: the bundle's]"
    return _make_option(value_type, help_text, metavar=metavar, section="Sampling")


EDIT_INPUTS = ("mask", "keep_rows")  # parameters of a pipeline call that only `edit` takes
_SEED_HELP = "Random seed; image i of a prompt has seed + i. [default: random, and printed]"
_COUNT_HELP = "Number of images per prompt; at most 1,024 in all. [default: 1]"
_SIZE_HELP = "Image size in pixels, as WIDTHxHEIGHT. [default: the bundle's]"
_QUALITY_HELP = "Preset of the bundle: strict (exact), balanced or fast. [default: strict]"
_METHOD_HELP = f"Decoding method instead of a quality, such as sjd:window=5: {', '.join(METHODS)}."
# Options of commands that are also parameters of a pipeline call, by name of the parameter.
REQUEST_OPTIONS: dict[str, Any] = {
    **{words.parameter: _make_input_option(words.option) for words in WORDS.values()},
    "seed": _make_option(int, _SEED_HELP),
    "num_images": _make_option(int, _COUNT_HELP, "-n", "--count"),
    "size": _make_option(str, _SIZE_HELP),
    "quality": _make_option(str, _QUALITY_HELP, section=METHOD),
    "method": _make_option(str, _METHOD_HELP, metavar=_METHOD_METAVAR, section=METHOD),
    **{name: _make_sampling_option(name) for name in SAMPLING},
}


def add_request_options(before: str, names: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the parameter `**options` in the signature of a command by some parameters in `REQUEST_OPTIONS`.

    They come before the parameter `before`, so that typer lists them there.
    """

    def replace_signature(command: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        signature = inspect.signature(command, eval_str=True)
        for parameter in signature.parameters.values():
            if parameter.name == before:
                parameters += [
                    parameter.replace(name=name, annotation=REQUEST_OPTIONS[name], default=None) for name in names
                ]
            parameters.append(parameter)
        vars(command)["__signature__"] = signature.replace(parameters=parameters[:-1])
        return command

    return replace_signature


def split_arguments(arguments: list[str], has_input_option: bool) -> tuple[str | None, list[str]]:
    """Split arguments such as `scenes "a red cube"` into the bundle, if there is one, and the prompts.

    If an option such as --class-id selects the images, a single word names a bundle, even one that does not exist.
    """
    from ..model_names import find_model_name

    bundle = find_model_name(arguments[0]) if arguments else None
    if arguments and has_input_option and " " not in arguments[0].strip():
        bundle = bundle or arguments[0]
    if bundle is not None:
        arguments = arguments[1:]
    single = [argument for argument in arguments if " " not in argument.strip()]
    if len(arguments) > 1 and single:
        actual = f"the single word {format_value(single[0])} among {len(arguments)}"
        expected = "a bundle's folder or name, then prompts in quotes"
        raise RequestError(field="prompt", found=actual, expected=expected)
    return bundle, arguments


@dataclass(frozen=True)
class EngineOptions:
    """Options that choose how graphs are run. `provider`: values of `--provider`."""

    threads: int | None = None
    engines: Path | None = None
    provider: list[str] | None = None

    @cached_property
    def _engine_folder(self) -> EngineFolder | None:
        from ..engines.engine_folder import open_engine_folder

        return None if self.engines is None else open_engine_folder(self.engines)

    def runs_on_cpu(self, bundle: Bundle) -> bool:
        """Return whether ONNX Runtime runs the graphs on the CPU. A GPU that `auto` chose is noted on stderr."""
        from ..engines.loader import choose_providers
        from .console import print_stderr

        if self.engines is not None:
            return False
        chosen = ProviderChoice.parse(self.provider or ())
        main_provider = choose_providers(chosen, bundle).main_provider
        if main_provider not in (DEFAULT_PROVIDER, chosen.main_provider):
            print_stderr(f"running on the GPU, provider {main_provider}; --provider cpu for the CPU")
        return main_provider == DEFAULT_PROVIDER

    def check(self) -> None:
        """Check the options before a bundle is downloaded."""
        from ..engines.host import choose_thread_count

        ProviderChoice.parse(self.provider or ())
        choose_thread_count(self.threads)
        _ = self._engine_folder

    def open_bundle(self, name: str) -> Bundle:
        """Open a bundle and check its files, except the graphs that TensorRT engines replace."""
        return open_named_bundle(name, self._engine_folder.list_replaced_files() if self._engine_folder else ())

    def load_pipeline(
        self, bundle: Bundle, settings: GenerationSettings | None = None, max_prompt_tokens: int | None = None
    ) -> Pipeline:
        """Load the graphs of a bundle, or the engines that replace them.

        If ONNX Runtime runs on the CPU, the memory is checked before: for `settings`, by default those that need the
        most, and for the longest prompt, if known.
        """
        from ..engines.host import count_usable_cores
        from ..memory import check_memory, largest_settings
        from ..pipeline import Pipeline
        from .console import print_stderr, show_progress

        if self.runs_on_cpu(bundle):
            check_memory(bundle, settings or largest_settings(bundle.manifest), max_prompt_tokens)
        with show_progress(announce_tasks=False) as progress:
            progress("loading graphs")
            pipeline = Pipeline.from_bundle(
                bundle, threads=self.threads, engines=self._engine_folder, provider=self.provider
            )
        if self.threads is not None and self.threads > (cores := count_usable_cores()):
            print_stderr(f"note: --threads {self.threads} on {cores} core{'s' * (cores > 1)}; one per core is faster")
        return pipeline


def download_published_model(name: str, skip_confirmation: bool) -> None:
    """Download a published model to the caches, and if needed export it, after the user has agreed."""
    from ..output.files import find_cache_folder
    from ..published import (
        check_host_requirements,
        fetch_published_model,
        find_bundle_source,
        find_published_model,
        find_unusable_bundle,
        is_missing_from_cache,
    )
    from .console import format_bytes, print_stderr, show_progress

    if not is_missing_from_cache(name):
        return
    source = find_bundle_source(name)
    check_host_requirements(name, source)
    if old := find_unusable_bundle(name):
        print_stderr(f"{old} is incomplete, damaged or of another release, and is replaced")
    model = find_published_model(name)
    bundle = f", and a bundle of at most this size into {find_cache_folder()}" if source is model else ""
    print_stderr(
        f"{name}: {format_bytes(source.download_bytes)} from {', '.join(source.repositories)} "
        f"(licence: {model.licence}) into the hub's cache{bundle}"
    )
    if not skip_confirmation:
        if not sys.stdin.isatty():
            raise RequestError(field="yes", found="no terminal to ask in", expected="--yes, to download it")
        if not typer.confirm("Download it?", default=True, err=True):
            raise RequestError(
                "cannot be used without the download, which you declined", field=name, remedy="give another bundle"
            )
    with show_progress() as progress:
        fetch_published_model(name, progress)


def open_named_bundle(name: str, skipped_roles: Collection[str] = ()) -> Bundle:
    """Open a bundle, check its files, and show the progress of the check on stderr."""
    from ..model_names import open_model
    from .console import show_progress

    with show_progress(announce_tasks=False) as progress:

        def report_progress(done: int, total: int) -> None:
            progress("checking the bundle's files (MB)", -(-done // 10**6), -(-total // 10**6))

        return open_model(name, skipped_roles=skipped_roles, progress=report_progress)
