"""Fixtures for tests of the HTTP server: servers of the bundle `scenes` and of a tiny bundle, and browser pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra `serve`")

from running_server import RunningServer
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RunningServer]]:
    """Yield a function that starts a server with command-line arguments; servers are killed after the last test."""
    started: list[RunningServer] = []

    def launch(*arguments: object, ready: bool = True, port: int = 0) -> RunningServer:
        started.append(RunningServer(tmp_path_factory.mktemp("server"), *arguments, port=port))
        return started[-1].wait_until_ready() if ready else started[-1]

    yield launch
    for server in started:
        server.kill()


@pytest.fixture(scope="session")
def scenes_server(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server("scenes", "--threads", 1, "--batch", 4)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def tiny_server(start_server: Callable[..., RunningServer], tiny_folder: Path) -> RunningServer:
    """Start a server of a tiny bundle, which generates an image in milliseconds."""
    return start_server(tiny_folder, "--threads", 1, "--batch", 4)


@pytest.fixture(scope="session")
def tiny_pipe(tiny_folder: Path) -> Pipeline:
    """Load the bundle of `tiny_server` in the test process."""
    return Pipeline.from_bundle(tiny_folder, threads=1)


@pytest.fixture(scope="session")
def scenes_pipe() -> Pipeline:
    return Pipeline.from_bundle("scenes", threads=1)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from browser_page import open_browser

    yield from open_browser()


@pytest.fixture
def page(scenes_server: RunningServer, browser: Any) -> Iterator[Any]:
    from browser_page import open_page

    yield from open_page(f"{scenes_server.url}/", browser)


@pytest.fixture
def phone_page(scenes_server: RunningServer, browser: Any) -> Iterator[Any]:
    from browser_page import PHONE, open_page

    yield from open_page(f"{scenes_server.url}/", browser, **PHONE)
