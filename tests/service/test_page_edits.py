"""Test editing a region of an image on the web page of `lantern-rt serve`, with the pointer and with the keyboard."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from browser_page import (
    BROWSER_MARKS,
    MAX_SECONDS,
    NUM_CODES,
    decode_image,
    download_image,
    generate_on_page,
    read_statistics,
)
from PIL import Image
from playwright.sync_api import Page, expect

pytestmark = BROWSER_MARKS


def edit_image(page: Page) -> bytes:
    """Regenerate the middle of the image: paint the region with the pointer, send the edit, return the saved file."""
    page.locator(".mask").scroll_into_view_if_needed()
    box = page.locator(".mask").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()
    with page.expect_response(re.compile("edits")):
        page.click(".redraw")
    expect(page.locator("#cancel")).to_be_hidden(timeout=1000 * MAX_SECONDS)
    expect(page.locator("#status")).to_contain_text("Done in")
    return download_image(page)


def test_a_region_painted_with_the_pointer_is_regenerated(page: Page, phone_page: Page) -> None:
    for tested_page in (page, phone_page):
        generate_on_page(tested_page, "sjd")
        pixels_before = decode_image(download_image(tested_page))
        tested_page.fill("#seed", "8")
        tested_page.click(".change")
        pixels_after = decode_image(edit_image(tested_page))
        assert (pixels_after != pixels_before).any(2)[112:144, 112:144].mean() > 0.5
        assert (pixels_after == pixels_before)[:48].all()
        assert 0 < int(read_statistics(tested_page)["preserved by the edit"][0]) < NUM_CODES - 12
        assert tested_page.evaluate("document.documentElement.scrollWidth") <= tested_page.viewport_size["width"]


def test_the_keyboard_selects_the_grid_cells_to_regenerate(page: Page) -> None:
    generate_on_page(page, "sjd")
    pixels_before = decode_image(download_image(page))
    page.fill("#seed", "8")
    page.focus(".change")
    page.keyboard.press("Enter")
    expect(page.locator(".mask")).to_be_focused()
    for key, times in (("ArrowDown", 9), ("ArrowRight", 40), ("ArrowLeft", 4)):  # to the last column
        for _ in range(times):
            page.keyboard.press(key)
    page.keyboard.press("Space")
    page.keyboard.press("Space")
    page.click(".redraw")
    expect(page.locator("#status")).to_have_text("Paint over a part of the image first")
    page.focus(".mask")
    page.keyboard.press("Space")
    with page.expect_response(re.compile("edits")):
        page.click(".redraw")
    expect(page.locator("#cancel")).to_be_hidden(timeout=1000 * MAX_SECONDS)
    expect(page.locator("#status")).to_contain_text("Done in")
    assert int(read_statistics(page)["preserved by the edit"][0]) == NUM_CODES - 1
    pixels_after = decode_image(download_image(page))
    assert (pixels_after == pixels_before)[:128].all()
    assert (pixels_after == pixels_before)[:, :160].all()


def test_an_uploaded_image_is_edited(page: Page, tmp_path: Path) -> None:
    Image.new("RGB", (300, 200), (90, 160, 60)).save(tmp_path / "own.jpg")
    page.set_input_files("#open", tmp_path / "own.jpg")
    expect(page.locator(".painting")).to_be_visible()
    assert (np.abs(decode_image(edit_image(page))[:40].astype(int) - (90, 160, 60)) < 4).all()
