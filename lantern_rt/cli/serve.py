"""The `serve` command: bundles behind HTTP, until a signal ends it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import RequestError
from ..inputs import check_int, require_library
from ..methods import METHODS
from .console import print_stderr
from .options import EngineOptions, EnginesOption, ProviderOption, ThreadsOption

if TYPE_CHECKING:
    from ..bundle.files import Bundle

EXAMPLES = """
lantern-rt serve
lantern-rt serve bundles/llamagen-b scenes --port 9000
lantern-rt serve --host 0.0.0.0 --api-key-file keys.txt --batch 16 --waiting 64
curl localhost:8000/v1/images/generations -H "content-type: application/json" -d '{"prompt": "a red cube on sand"}'
"""
LIBRARIES = ("uvicorn", "sse_starlette", "prometheus_client", "python_multipart")
LIMITS, REACH = "Limits", "Who may ask"  # groups in help


def serve(
    bundles: Annotated[
        list[str] | None,
        typer.Argument(metavar="[BUNDLE]...", help="Bundles: folders, embedded names, or hf: names. [default: scenes]"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 is every one.", rich_help_panel=REACH)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", rich_help_panel=REACH)] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File of API keys, each on a line, perhaps behind a name; SIGHUP reads it again.",
            rich_help_panel=REACH,
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", help="Site whose pages may ask; may be given several times.", rich_help_panel=REACH
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            help="Images that share passes at most. [default: what memory is good for]", rich_help_panel=LIMITS
        ),
    ] = None,
    waiting: Annotated[
        int, typer.Option(help="Images that may wait for them; more are refused for now.", rich_help_panel=LIMITS)
    ] = 64,
    deadline: Annotated[
        float,
        typer.Option(help="Seconds that a request may take, also once the server is stopped.", rich_help_panel=LIMITS),
    ] = 600.0,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD",
            help="Method that may be asked for; may be given several times. [default: all]",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    max_n: Annotated[int, typer.Option(help="Images of a request at most, 1 .. 10.", rich_help_panel=LIMITS)] = 10,
    alias: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=MODEL", help="Another name of a model; may be given several times."),
    ] = None,
    threads: ThreadsOption = None,
    engines: EnginesOption = None,
    provider: ProviderOption = None,
) -> None:
    """Serve bundles over HTTP: OpenAI's Images API, a web page, metrics.

    The log is a line of JSON for each request, on stderr. SIGTERM and Ctrl-C finish what is being drawn; a second
    Ctrl-C does not wait.
    """
    for library in LIBRARIES:
        require_library(library, "serve", "serve")
    from ..asynchronous import AsyncPipeline
    from ..serve.server import Server
    from ..serve.state import Limits

    if not 0 < deadline < 1e9:
        raise RequestError(field="deadline", found=f"{deadline:g}", expected="seconds above 0")
    check_int("port", port, 8000, 0, 65535)
    check_int("max_n", max_n, 10, 1, 10)
    for name in methods or ():
        if name not in METHODS:
            raise RequestError(field="methods", found=repr(name), expected=", ".join(METHODS))
    options = EngineOptions(threads, engines, provider)
    opened = _open(bundles or ["scenes"], options)
    aliases = _aliases(alias or (), [bundle.manifest.name for bundle in opened])
    limits: dict[str, Any] = {"together": batch, "waiting": waiting, **asdict(options)}
    models = [partial(AsyncPipeline.from_bundle, bundle, **limits) for bundle in opened]
    own = Limits(deadline=deadline, api_key_file=api_key_file, methods=methods or (), max_n=max_n, aliases=aliases)
    server = Server(models, host, port, own, cors or ())
    names = ", ".join(bundle.manifest.name for bundle in opened)
    print_stderr(f"{names}: {server.url} (a page; images at /v1/images/generations); Ctrl-C stops")
    with _logged():
        server.run()


def _aliases(given: Sequence[str], models: Sequence[str]) -> dict[str, str]:
    aliases: dict[str, str] = {}
    for text in given:
        name, _, model = text.partition("=")
        if not name or name in models or model not in models:
            expected = f"a new name, and = with one of {', '.join(models)}"
            raise RequestError(field="alias", found=repr(text), expected=expected)
        aliases[name] = model
    return aliases


def _open(names: list[str], options: EngineOptions) -> list[Bundle]:
    """Bundles of different names that this host has memory for, each by itself."""
    from ..memory import check_memory, largest_settings

    if options.engines is not None and len(names) > 1:
        expected = "one: a folder of engines is built of one bundle"
        raise RequestError(field="engines", found=f"{len(names)} bundles", expected=expected)
    by_name: dict[str, Bundle] = {}
    for name in names:
        bundle = options.open_bundle(name)
        if bundle.manifest.name in by_name:
            twice = f"two named {bundle.manifest.name}"
            raise RequestError(field="bundles", found=twice, expected="one each: requests choose a model by its name")
        if options.runs_on_cpu(bundle):
            check_memory(bundle, largest_settings(bundle.manifest))
        by_name[bundle.manifest.name] = bundle
    return list(by_name.values())


@contextmanager
def _logged() -> Iterator[None]:
    logger = logging.getLogger("lantern_rt.serve")
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: record.levelno < logging.WARNING)  # those are said for every command
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
