"""The `serve` command: bundles behind HTTP, until a signal ends it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ..checks import require_library, whole
from ..errors import RequestError
from .console import say
from .options import ENGINE, Running

EXAMPLES = """
lantern-rt serve
lantern-rt serve bundles/llamagen-b scenes --port 9000
lantern-rt serve --host 0.0.0.0 --api-key-file keys.txt --together 16 --waiting 64
lantern-rt serve scenes --provider cpu --provider vq_decoder=openvino-bf16
curl localhost:8000/v1/images/generations -H "content-type: application/json" -d '{"prompt": "a red cube on sand"}'
"""
LIMITS, REACH = "Limits", "Who may ask"  # groups in help


def serve(
    bundles: Annotated[
        list[str] | None,
        typer.Argument(metavar="[BUNDLE]...", help="Bundle folders, or names of embedded ones. [default: scenes]"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 is every one.", rich_help_panel=REACH)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", rich_help_panel=REACH)] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File of the API keys that are accepted, one a line.", rich_help_panel=REACH)
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", help="Site whose pages may ask; may be given several times.", rich_help_panel=REACH
        ),
    ] = None,
    together: Annotated[
        int | None,
        typer.Option(
            help="Images that share passes at most. [default: what memory is good for]", rich_help_panel=LIMITS
        ),
    ] = None,
    waiting: Annotated[
        int, typer.Option(help="Images that may wait for them; more are told to come again.", rich_help_panel=LIMITS)
    ] = 64,
    deadline: Annotated[float, typer.Option(help="Seconds that a request may take.", rich_help_panel=LIMITS)] = 600.0,
    drain_seconds: Annotated[
        float,
        typer.Option(help="Seconds that requests have to end once the server is stopped.", rich_help_panel=LIMITS),
    ] = 300.0,
    *,
    running: Running,
    picture_threads: Annotated[
        int, typer.Option(help="Threads of each bundle's image decoder.", rich_help_panel=ENGINE)
    ] = 1,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Have the log hold prompts.")] = False,
) -> None:
    """Serve bundles over HTTP: OpenAI's Images API, a web page, metrics.

    The log is a line of JSON for each request, on stderr. SIGTERM and Ctrl-C finish what is being drawn; a second
    Ctrl-C does not wait.
    """
    require_library("uvicorn", "lantern-rt serve", "serve")
    require_library("prometheus_client", "lantern-rt serve", "serve")
    from ..asynchronous import AsyncPipeline
    from ..bundle.files import Bundle
    from ..planning.memory import check_memory
    from ..requests import resolve_settings
    from ..serve.front import Limits, read_keys
    from ..serve.server import Load, Server

    for name, value in (("deadline", deadline), ("drain_seconds", drain_seconds)):
        if not 0 < value < 1e9:
            raise RequestError(f"{name}: found {value:g}, expected seconds above 0")
    whole("port", port, 8000, 0, 65535)
    keys = [] if api_key_file is None else read_keys(api_key_file)
    opened = [running.open_bundle(name) for name in bundles or ["scenes"]]
    names = [bundle.manifest.name for bundle in opened]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"bundles: found two of the name {twice}, expected one each: requests name a model by it")
    if running.engines is not None and len(opened) > 1:
        raise RequestError(f"engines: found {len(opened)} bundles, expected one: a folder is built of one bundle")
    if running.on_cpu:
        for bundle in opened:
            settings = resolve_settings(bundle.manifest, {"method": "auto"})
            check_memory(bundle, settings)

    def loader(bundle: Bundle) -> Load:
        options = {**vars(running), "picture_threads": picture_threads}
        return lambda: AsyncPipeline.from_bundle(bundle, together=together, waiting=waiting, **options)

    limits = Limits(deadline=deadline, keys=keys, log_prompts=log_prompts)
    models = [loader(bundle) for bundle in opened]
    server = Server(models, host, port, limits, cors or (), drain_seconds)
    say(f"{', '.join(names)}: {server.url} (a page; images at /v1/images/generations); Ctrl-C stops")
    with _logged():
        server.run()


@contextmanager
def _logged() -> Iterator[None]:
    """What the server logs are lines on stderr while the block runs."""
    logger, handler = logging.getLogger(__package__.partition(".")[0] + ".serve"), _Lines()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:  # those are said for every command
            say(record.getMessage())
