"""Helpers that open the web page of `lantern-rt serve` in Chromium and use its controls."""

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
SKIP_REASON = "needs Chromium, as in Debian's package `chromium`"
BROWSER_MARKS = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=SKIP_REASON)]
CHROMIUM_OPTIONS = (
    "--disable-background-networking --disable-component-update --disable-gpu --disable-quic --disable-sync "
    "--no-first-run --no-sandbox"
)
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
NUM_CODES = 256  # codes of an image of `scenes`
MAX_SECONDS = 60  # time limit of an image
MAX_HISTORY_IMAGES = 24  # images that the page keeps in its history


def open_browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as programs:
        browser = programs.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_OPTIONS.split())
        yield browser
        browser.close()


def open_page(server: str, browser: Browser, **options: object) -> Iterator[Page]:
    """Yield the page once Generate is enabled; at the end, no script failed and no request left the server."""
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
    # The browser logs this message for every request that the server rejects.
    rejection_message = "Failed to load resource: the server responded with a status of 4"
    assert [error for error in errors if not error.startswith(rejection_message)] == []
    assert [address for address in addresses if not address.startswith((server, "data:", f"blob:{server}"))] == []


def generate_on_page(page: Page, method: str = "strict", compared_method: str = "") -> None:
    """Generate images with the button Generate, by one or two methods, and wait until all are complete."""
    page.select_option("#method", method)
    page.select_option("#other", compared_method)
    page.click("#draw")
    expect(page.locator("#cancel")).to_be_hidden(timeout=1000 * MAX_SECONDS)


def download_image(page: Page, number: int = 0) -> bytes:
    with page.expect_download() as download:
        page.click(f".save >> nth={number}")
    return download.value.path().read_bytes()


def read_statistics(page: Page) -> dict[str, list[str]]:
    """Return the cells of each row of the statistics table, by row name."""
    # The page fills the table in its next frame. One script reads all rows, so no row is of an older table.
    rows: dict[str, list[str]] = page.evaluate(
        """async () => {
            await new Promise(requestAnimationFrame);
            const rows = [...document.querySelectorAll("#figures tbody tr")];
            const text = (row, tag) => [...row.querySelectorAll(tag)].map((cell) => cell.textContent);
            return Object.fromEntries(rows.map((row) => [text(row, "th")[0], text(row, "td")]));
        }"""
    )
    return rows


def decode_image(file: bytes) -> np.ndarray:
    """Return the pixels of an image file, uint8 `[height, width, 3]`."""
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
