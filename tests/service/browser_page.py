"""Drive the page of `lantern-rt serve` in a browser, for tests of what a person sees and can do there."""

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
CODES = 256
SECONDS = 60
REMEMBERED = 24


def open_browser() -> Iterator[Browser]:
    """Start Chromium with a new, empty profile."""
    with playwright.sync_playwright() as programs:
        browser = programs.chromium.launch(executable_path=CHROMIUM, args=QUIET.split())
        yield browser
        browser.close()


def open_page(server: str, browser: Browser, **options: object) -> Iterator[Page]:
    """Open the page, ready to draw; at the end, no request has left the server and no script has failed."""
    context = browser.new_context(**options)
    page = context.new_page()
    errors = []
    addresses = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type in ("error", "warning") else None)
    page.on("request", lambda request: addresses.append(request.url))
    page.goto(server)
    expect(page.locator("#draw")).to_be_enabled()
    yield page
    context.close()
    rejection_message = (
        "Failed to load resource: the server responded with a status of 4"  # logged for every rejected request
    )
    assert [error for error in errors if not error.startswith(rejection_message)] == []
    assert [address for address in addresses if not address.startswith((server, "data:", f"blob:{server}"))] == []


def draw(page: Page, method: str = "strict", compared_method: str = "") -> None:
    """Press Draw and wait for the end."""
    page.select_option("#method", method)
    page.select_option("#other", compared_method)
    page.click("#draw")
    expect(page.locator("#cancel")).to_be_hidden(timeout=1000 * SECONDS)


def download_image(page: Page, number: int = 0) -> bytes:
    """Return the file of a displayed image."""
    with page.expect_download() as download:
        page.click(f".save >> nth={number}")
    return download.value.path().read_bytes()


def read_figures(page: Page) -> dict[str, list[str]]:
    """Return the table of figures by the names of its rows."""
    rows = page.locator("#figures tbody tr").all()
    return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows}


def decode_image(file: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
