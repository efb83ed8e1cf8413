"""The page of `lantern-rt serve` in a browser, for tests of what a person sees there, and can do."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
from playwright.sync_api import Browser, Page, expect  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NEEDED = "needs Chromium, as in Debian's package `chromium`"
IN_A_BROWSER = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=NEEDED)]
QUIET = ("--disable-background-networking --disable-component-update --disable-gpu --disable-quic --disable-sync "
         "--no-first-run --no-sandbox")  # fmt: skip
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
CODES, SECONDS, REMEMBERED = 256, 60, 24


def open_browser() -> Iterator[Browser]:
    """Chromium with a new, empty profile."""
    with playwright.sync_playwright() as programs:
        browser = programs.chromium.launch(executable_path=CHROMIUM, args=QUIET.split())
        yield browser
        browser.close()


def visit(server: str, browser: Browser, **options: object) -> Iterator[Page]:
    """The page, ready to draw; whatever a test does, no request leaves the server and no script fails."""
    context = browser.new_context(**options)
    page, errors, addresses = context.new_page(), [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type in ("error", "warning") else None)
    page.on("request", lambda request: addresses.append(request.url))
    page.goto(server)
    expect(page.locator("#draw")).to_be_enabled()
    yield page
    context.close()
    refused = "Failed to load resource: the server responded with a status of 4"  # said of every refusal
    assert [error for error in errors if not error.startswith(refused)] == []
    assert [one for one in addresses if not one.startswith((server, "data:", f"blob:{server}"))] == []


def draw(page: Page, method: str = "strict", other: str = "") -> None:
    """Press Draw and wait for the end."""
    page.select_option("#method", method)
    page.select_option("#other", other)
    page.click("#draw")
    expect(page.locator("#cancel")).to_be_hidden(timeout=1000 * SECONDS)


def saved(page: Page, number: int = 0) -> bytes:
    """The file of an image that is shown."""
    with page.expect_download() as download:
        page.click(f".save >> nth={number}")
    return download.value.path().read_bytes()


def figures(page: Page) -> dict[str, list[str]]:
    """The table, by the names of its rows."""
    rows = page.locator("#figures tbody tr").all()
    return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows}


def read(file: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
