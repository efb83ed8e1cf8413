"""Options that several commands share, and what makes options of the fields of a class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.models import ArgumentInfo, OptionInfo

from ..engines.ort.providers import DEFAULT_PROVIDER, Providers
from ..errors import LanternError
from ..methods import PARAMETERS, Sampling

if TYPE_CHECKING:
    from ..bundle.files import Bundle
    from ..pipeline import Pipeline
    from ..requests import Settings

BundleName = Annotated[str, typer.Argument(help="Bundle folder, or the name of an embedded bundle.")]
Prompts = Annotated[Path | None, typer.Option(help="Text file, one prompt a line. [default: the bundle's]")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, and nothing else.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
SUBJECTS, OUTPUT, METHOD, SAMPLING, ENGINE = "What to draw", "Output", "Method", "Sampling", "Engine"  # groups in help
Embeddings = Annotated[
    Path | None,
    typer.Option(
        metavar="NPZ",
        help="For bundles of text embeddings: a file with `embeddings [prompts, tokens, dim]`, padded on the right, "
        "and with `mask [prompts, tokens]` if some are padded.",
        rich_help_panel=SUBJECTS,
    ),
]


@dataclass(frozen=True)
class Running:
    """What decodes: engines in place of the bundle's graphs, and how they run."""

    threads: Annotated[
        int | None, typer.Option(help="Threads of the engine. [default: one per core]", rich_help_panel=ENGINE)
    ] = None
    engines: Annotated[
        Path | None,
        typer.Option(
            help="Folder made by build-engine from this bundle, to run instead of its graphs.", rich_help_panel=ENGINE
        ),
    ] = None
    provider: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[GRAPH=]NAME",
            help="What ONNX Runtime runs on: cpu, cuda, webgpu, openvino, ... (docs/gpu.md). Once more for one graph, "
            "such as vq_decoder=openvino. [default: cpu, and for vq_decoder what tune found]",
            rich_help_panel=ENGINE,
        ),
    ] = None
    @property
    def on_cpu(self) -> bool:
        """Whether ONNX Runtime runs the bundle's own graphs on the CPU. Raises: EngineError: no such provider."""
        return self.engines is None and Providers.read(self.provider or ()).main == DEFAULT_PROVIDER

    def open_bundle(self, name: str) -> Bundle:
        """The bundle, without hashing the graphs that engines stand in for."""
        from ..engines.engine_folder import open_engine_folder

        return open_whole(name, () if self.engines is None else open_engine_folder(self.engines).replaced())

    def load(
        self,
        bundle: Bundle,
        settings: Settings | None = None,
        picture_threads: int | None = None,
        prefix: int | None = None,
    ) -> Pipeline:
        """The bundle's graphs, or the engines in their place, ready to decode.

        settings: what is to be decoded with; None where that is several things. picture_threads: as of `Pipeline`.
        prefix: tokens of the longest prompt, if known.
        Raises: RequestError: there is too little memory; counted where ONNX Runtime runs on the CPU, not for GPUs.
        """
        from ..auto.memory import check_memory
        from ..engines.engine_folder import open_engine_folder
        from ..pipeline import Pipeline
        from ..requests import resolve_settings
        from .console import progress

        engines = None if self.engines is None else open_engine_folder(self.engines)
        if engines.on_cpu if engines else self.on_cpu:
            chosen = settings or resolve_settings(bundle.manifest, {"method": "auto"})
            check_memory(bundle, chosen, engines, prefix)
        with progress(lines=False) as show:
            show("loading graphs")
            options = {**vars(self), "engines": engines, "picture_threads": picture_threads}
            return Pipeline.from_bundle(bundle, **options)


def open_whole(name: str, unread: Collection[str] = ()) -> Bundle:
    """A bundle, and how far comparing its files is; `unread` as `open_bundle` has it."""
    from ..bundle.files import open_bundle
    from .console import progress

    with progress(lines=False, unit="bytes") as show:
        return open_bundle(name, unread=unread, counted=partial(show, "checking the bundle's files"))


Shaping = Annotated[dict[str, Any], SAMPLING, Sampling]  # guidance, temperature and filters


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one option for each field of some parameters: dataclasses, and dictionaries marked by models.

    In `Annotated[dict[str, Any], GROUP, Model, ...]` only fields count that the models describe; None where not given.
    A refusal that begins with the name of a parameter names the option instead.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for parameter in _parameters(command):
        hint = parameter.annotation
        metadata: tuple[Any, ...] = getattr(hint, "__metadata__", ())
        models = [one for one in metadata if isinstance(one, type)]
        if models or is_dataclass(hint):
            own = _described(models, metadata[0]) if models else _parameters(hint)
            groups[parameter.name] = (dict if models else hint, [one.name for one in own])
            parameters += own
        else:
            parameters.append(parameter)

    options = {_named(one).strip("-").replace("-", "_"): _named(one) for one in parameters}

    def run(**given: Any) -> None:
        for name, (make, names) in groups.items():
            given[name] = make(**{one: given.pop(one) for one in names})
        try:
            command(**given)
        except LanternError as error:
            name, colon, rest = str(error).partition(":")
            option = options.get(name.replace(" ", "_").replace("-", "_"))
            if option is None or not colon:
                raise
            raise type(error)(f"{option}:{rest}") from error

    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(made: Callable[..., Any]) -> list[inspect.Parameter]:
    """What a function takes, or a dataclass where fields are options, all by name."""
    hints, kind = get_type_hints(made, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    given = [one.replace(annotation=hints[one.name], kind=kind) for one in inspect.signature(made).parameters.values()]
    return [one for one in given if get_origin(one.annotation) is Annotated or not is_dataclass(made)]


def _named(parameter: inspect.Parameter) -> str:
    """What a user calls it: the option, or the argument."""
    marks = [one for one in parameter.annotation.__metadata__ if isinstance(one, OptionInfo | ArgumentInfo)]
    if any(isinstance(mark, ArgumentInfo) for mark in marks):
        return parameter.name
    flags = (flag for mark in marks for flag in (mark.default, *(mark.param_decls or ())))
    given = next((flag for flag in flags if isinstance(flag, str) and flag.startswith("-")), None)
    return given or f"--{parameter.name.replace('_', '-')}"


def _described(models: Sequence[type[BaseModel]], group: str) -> list[inspect.Parameter]:
    """An option for each field that has a description; its help names the methods that take it."""
    fields: dict[str, FieldInfo] = {}
    for model in models:
        fields |= {name: field for name, field in model.model_fields.items() if name not in fields}
    options = []
    for name, field in fields.items():
        public = field.alias or name
        if field.description:
            takers = f" ({', '.join(PARAMETERS[public])})" if public in PARAMETERS else ""
            text = f"{field.description.rstrip('.')}{takers}. [default: the bundle's]"
            option = typer.Option(f"--{public.replace('_', '-')}", help=text, rich_help_panel=group)
            own = {"default": None, "annotation": Annotated[Optional[field.annotation], option]}  # noqa: UP045
            options.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, **own))
    return options
