"""Options that several commands share, and what makes options of the fields of a class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ..methods import Sampling

if TYPE_CHECKING:
    from ..bundle.files import Bundle
    from ..pipeline import Pipeline

BundleName = Annotated[str, typer.Argument(help="Bundle folder, or the name of an embedded bundle.")]
Prompts = Annotated[Path | None, typer.Option(help="Text file, one prompt a line. [default: the bundle's]")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, and nothing else.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
ProviderName = Annotated[str, typer.Option(help="What ONNX Runtime runs on: cpu, cuda, openvino, coreml or directml.")]


@dataclass(frozen=True)
class Running:
    """What decodes: engines in place of the bundle's graphs, and how they run."""

    threads: Annotated[int | None, typer.Option(help="Threads of the engine. [default: one per core]")] = None
    engines: Annotated[
        Path | None, typer.Option(help="Folder made by build-engine from this bundle, to run instead of its graphs.")
    ] = None
    provider: ProviderName = "cpu"

    def open_bundle(self, name: str) -> Bundle:
        """The bundle, without hashing the graphs that engines stand in for."""
        from ..bundle.files import open_bundle

        if self.engines is None:
            return open_bundle(name)
        from ..engines.engine_folder import open_engine_folder

        return open_bundle(name, unread=open_engine_folder(self.engines).replaced())

    def load(self, bundle: Bundle) -> Pipeline:
        """The bundle's graphs, or the engines in their place, ready to decode."""
        from ..pipeline import Pipeline

        return Pipeline.from_bundle(bundle, self.threads, provider=self.provider, engines=self.engines)


class FieldsOf:
    """Marks a parameter that takes a dictionary: an option for each field that one of these models describes.

    Type and help are the field's own; help names the methods that take it. None where not given.
    """

    def __init__(self, *models: type[BaseModel]) -> None:
        self.models = models

    def options(self) -> dict[str, Any]:
        """Parameter name and annotated type of every option."""
        described: dict[str, FieldInfo] = {}
        takers: dict[str, list[str]] = {}
        for model in self.models:
            method = [model.model_fields["method"].default] if "method" in model.model_fields else []
            for name, field in model.model_fields.items():
                if field.description:
                    described.setdefault(name, field)
                    takers[name] = takers.get(name, []) + method
        options: dict[str, Any] = {}
        for name, field in described.items():
            of = f" ({', '.join(takers[name])})" if takers[name] else ""
            text = f"{(field.description or '').rstrip('.')}{of}. [default: the bundle's]"
            flag = f"--{(field.alias or name).replace('_', '-')}"
            options[name] = Annotated[Optional[field.annotation], typer.Option(flag, help=text)]  # noqa: UP045
        return options


Shaping = Annotated[dict[str, Any], FieldsOf(Sampling)]  # guidance, temperature and filters


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one option for each field of a parameter that is a dataclass, or marked by `FieldsOf`."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        marker = next((one for one in getattr(hint, "__metadata__", ()) if isinstance(one, FieldsOf)), None)
        if marker or is_dataclass(hint):
            types = marker.options() if marker else get_type_hints(hint, include_extras=True)
            types = {field: each for field, each in types.items() if get_origin(each) is Annotated}
            own = {} if marker else inspect.signature(hint).parameters
            defaults = {field: own[field].default if own else None for field in types}
            groups[name] = (dict if marker else hint, list(types))
            each = [parameter.replace(name=n, annotation=t, default=defaults[n]) for n, t in types.items()]
        else:
            each = [parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY)]
        parameters += each

    def run(**given: Any) -> None:
        for name, (make, names) in groups.items():
            given[name] = make(**{one: given.pop(one) for one in names})
        command(**given)

    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
