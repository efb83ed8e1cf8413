"""The `serve` command: serves bundles over HTTP until a signal stops it."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import RequestError
from ..inputs import check_int, require_library
from ..methods import METHODS
from ..model_names import find_model_name
from .options import (
    EngineOptions,
    EnginesOption,
    ProviderOption,
    ThreadsOption,
    YesOption,
    download_published_model,
)

if TYPE_CHECKING:
    from ..bundle.files import Bundle

EXAMPLES = """
lantern-rt serve
lantern-rt serve bundles/llamagen-b scenes --port 9000
lantern-rt serve --host 0.0.0.0 --api-key-file keys.txt --batch 16 --waiting 64
curl localhost:8000/v1/images/generations -H "content-type: application/json" -d '{"prompt": "a red cube on sand"}'
"""
_SIZE = re.compile(r"[1-9]\d*x[1-9]\d*", re.ASCII)
LIBRARIES = ("uvicorn", "sse_starlette", "prometheus_client", "python_multipart")
# Sections in help.
LIMITS = "Limits"
LOG = "Log"
ACCESS = "Access"

BundlesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[BUNDLE]...",
        help="Bundles: folders, names of embedded bundles or published models, or hf:owner/name[@revision]. "
        "[default: scenes]",
    ),
]
HostOption = Annotated[
    str, typer.Option(help="Address to listen on; 0.0.0.0: all addresses of the host.", rich_help_panel=ACCESS)
]
PortOption = Annotated[int, typer.Option(help="Port to listen on; 0: a free port.", rich_help_panel=ACCESS)]
ApiKeyFileOption = Annotated[
    Path | None,
    typer.Option(
        help="File of API keys, one per line, each optionally after a name; SIGHUP reloads it. "
        "[default: the environment variable LANTERN_RT_API_KEY, if set]",
        rich_help_panel=ACCESS,
    ),
]
CorsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        help="Site whose pages may send requests; may be given several times.",
        rich_help_panel=ACCESS,
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option(help="Maximum batch size in images. [default: as memory allows]", rich_help_panel=LIMITS),
]
WaitingOption = Annotated[
    int,
    typer.Option(help="Maximum number of queued images; further requests get status 429.", rich_help_panel=LIMITS),
]
DeadlineOption = Annotated[
    float,
    typer.Option(
        help="Maximum duration of a request in seconds, even while the server is stopping.", rich_help_panel=LIMITS
    ),
]
MethodsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METHOD",
        help="Method that requests may select, besides qualities; may be given several times. [default: all]",
        rich_help_panel=LIMITS,
    ),
]
MaxNOption = Annotated[int, typer.Option(help="Maximum number of images per request, 1 .. 10.", rich_help_panel=LIMITS)]
AliasOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=MODEL", help="Additional name of a model; may be given several times."),
]
MapSizeOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SIZE=SIZE",
        help="Size that clients request, and the model's size that they get, or auto; may be given several times.",
    ),
]
LogLevelOption = Annotated[
    str,
    typer.Option(metavar="info|warning|error", help="Lowest level of the lines in the log.", rich_help_panel=LOG),
]
LogFormatOption = Annotated[
    str | None,
    typer.Option(
        metavar="json|text",
        help="Format of the lines in the log. [default: text on a terminal, else json]",
        rich_help_panel=LOG,
    ),
]


def serve(
    bundles: BundlesArgument = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    api_key_file: ApiKeyFileOption = None,
    cors: CorsOption = None,
    batch: BatchOption = None,
    waiting: WaitingOption = 64,
    deadline: DeadlineOption = 600.0,
    methods: MethodsOption = None,
    max_n: MaxNOption = 10,
    alias: AliasOption = None,
    map_size: MapSizeOption = None,
    log_level: LogLevelOption = "info",
    log_format: LogFormatOption = None,
    threads: ThreadsOption = None,
    engines: EnginesOption = None,
    provider: ProviderOption = None,
    yes: YesOption = False,
) -> None:
    """Serve bundles over HTTP: OpenAI's Images API, SGLang's protocol for GLM-Image, a web page, metrics.

    The log on stderr has a line for each request. SIGTERM and Ctrl-C finish running requests first; a second
    Ctrl-C stops at once.
    """
    for library in LIBRARIES:
        require_library(library, "serve", "serve")
    from ..asynchronous import AsyncPipeline
    from ..serve.log import log_to_stderr
    from ..serve.server import Server
    from ..serve.state import ServerLimits

    if not 0 < deadline < 1e9:
        raise RequestError(field="deadline", found=f"{deadline:g}", expected="a number of seconds above 0")
    check_int("port", port, 8000, 0, 65535)
    log_format = log_format or ("text" if sys.stderr.isatty() else "json")
    check_int("max_n", max_n, 10, 1, 10)
    _check_choice_options(methods or (), log_level, log_format)
    options = EngineOptions(threads, engines, provider)
    _check_limit_options(api_key_file, cors or (), batch, waiting)
    texts = [find_model_name(name) or name for name in bundles or ["scenes"]]
    opened = _open_available_bundles(texts, options)
    aliases = _parse_aliases(alias or (), [*opened])
    missing = [text for text, bundle in zip(texts, opened.values(), strict=True) if bundle is None]
    _parse_size_mappings(map_size or (), [bundle for bundle in opened.values() if bundle], missing)
    for text in missing:
        download_published_model(text, yes)
    models = {
        name: _open_bundle_and_check_memory(text, bundle, options)
        for text, (name, bundle) in zip(texts, opened.items(), strict=True)
    }
    sizes = _parse_size_mappings(map_size or (), [*models.values()])
    limits: dict[str, Any] = {"max_images_per_pass": batch, "max_queued_images": waiting, **asdict(options)}
    loaders = {name: partial(AsyncPipeline.from_bundle, bundle, **limits) for name, bundle in models.items()}
    rules: dict[str, Any] = {"methods": methods or (), "max_n": max_n}
    access = ServerLimits(deadline, api_key_file=api_key_file, aliases=aliases, mapped_sizes=sizes, **rules)
    server = Server(loaders, host, port, access, cors or ())
    with log_to_stderr(log_level, log_format):
        server.run()


def _check_choice_options(methods: Sequence[str], log_level: str, log_format: str) -> None:
    from ..serve.log import FORMATS, LEVELS

    selected = [("methods", name, METHODS) for name in methods]
    for field, value, known in (("log_level", log_level, LEVELS), ("log_format", log_format, FORMATS), *selected):
        if value not in known:
            raise RequestError(field=field, found=repr(value), expected=", ".join(known))


def _check_limit_options(
    api_key_file: Path | None, allowed_origins: Sequence[str], max_images_per_pass: int | None, max_queued_images: int
) -> None:
    """Check options that the server uses only after it has opened the bundles."""
    from ..serve.app import normalize_origin
    from ..serve.state import read_api_keys

    if api_key_file is not None:
        read_api_keys(api_key_file)
    for origin in allowed_origins:
        normalize_origin(origin)
    check_int("max_images_per_pass", max_images_per_pass, 1, 1, 4096)
    check_int("max_queued_images", max_queued_images, 64, 0, 1 << 20)


def _parse_aliases(alias_options: Sequence[str], model_names: Sequence[str]) -> dict[str, str]:
    """Return the name of a model by its alias, from options such as `NAME=MODEL`."""
    aliases: dict[str, str] = {}
    for text in alias_options:
        name, _, model = text.partition("=")
        if not name or name in model_names or model not in model_names:
            expected = f"NAME=MODEL with a new name and one of the models {', '.join(model_names)}"
            raise RequestError(field="alias", found=repr(text), expected=expected)
        aliases[name] = model
    return aliases


def _parse_size_mappings(
    size_options: Sequence[str], bundles: Sequence[Bundle], missing_models: Sequence[str] = ()
) -> dict[str, str]:
    """Return the size of the images by the size in a request, from options such as `1024x1024=256x256`."""
    from ..published import find_published_model

    tables = [find_published_model(name).sizes for name in missing_models]
    known = {entry.name for bundle in bundles for entry in bundle.manifest.all_sizes}
    known |= {size for text in tables for size in text.split(", ") if _SIZE.fullmatch(size)}
    lists_all = not any("," in text for text in tables)
    sizes: dict[str, str] = {}
    for text in size_options:
        asked, _, size = text.partition("=")
        wrong = size not in {*known, "auto"} and (lists_all or not _SIZE.fullmatch(size))
        if not _SIZE.fullmatch(asked) or asked in known or wrong:
            expected = f"SIZE=SIZE, as 1024x1024=auto: a new size, and one of {', '.join(sorted(known))}, auto"
            raise RequestError(field="map_size", found=repr(text), expected=expected)
        sizes[asked] = size
    return sizes


def _open_available_bundles(bundle_names: Sequence[str], engine_options: EngineOptions) -> dict[str, Bundle | None]:
    """Open the bundles on this host, by the names of their models, which must differ; None: not in the cache."""
    from ..published import is_missing_from_cache

    engine_options.check()
    if engine_options.engines is not None and len(bundle_names) > 1:
        expected = "one bundle, from which the engines were built"
        raise RequestError(field="engines", found=f"{len(bundle_names)} bundles", expected=expected)
    models: dict[str, Bundle | None] = {}
    for text in bundle_names:
        bundle = None if is_missing_from_cache(text) else engine_options.open_bundle(text)
        name = bundle.manifest.name if bundle else text
        if name in models:
            problem = f"two bundles named {name}"
            remedy = "export one of them to a folder of another name"
            raise RequestError(field="bundles", found=problem, expected="different names", remedy=remedy)
        models[name] = bundle
    return models


def _open_bundle_and_check_memory(name: str, bundle: Bundle | None, engine_options: EngineOptions) -> Bundle:
    from ..memory import check_memory, largest_settings

    bundle = bundle or engine_options.open_bundle(name)
    if engine_options.runs_on_cpu(bundle):
        check_memory(bundle, largest_settings(bundle.manifest))
    return bundle
