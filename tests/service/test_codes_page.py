"""Test the web page with a bundle that has no image decoder: the page shows a map of the codes and saves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from browser_page import BROWSER_MARKS, download_image, generate_on_page, open_page
from playwright.sync_api import Page, expect
from running_server import RunningServer

from lantern_rt import Pipeline

pytestmark = BROWSER_MARKS


@pytest.fixture
def codes_page(start_server: Callable[..., RunningServer], glm_image_bundle: Path, browser: Any) -> Iterator[Page]:
    yield from open_page(f"{start_server(glm_image_bundle, '--threads', 1).url}/", browser)


def test_the_page_shows_and_saves_the_codes_of_a_bundle_without_an_image_decoder(
    codes_page: Page, glm_image_bundle: Path
) -> None:
    page = codes_page
    page.fill("#prompt", "a red fox")
    page.fill("#seed", "7")
    page.select_option("#size", "160x96")
    generate_on_page(page, "strict")
    expect(page.locator("#status")).to_contain_text("Done in")
    expect(page.locator(".count")).to_have_text("255 of 255 tokens")
    assert page.locator(".stage img").evaluate("image => [image.naturalWidth, image.naturalHeight]") == [40, 24]
    (codes,) = Pipeline.from_bundle(glm_image_bundle, threads=1)("a red fox", seed=7, size="160x96").codes
    codes_file = json.loads(download_image(page))
    assert [*chain(*codes_file["first_codes"], *codes_file["codes"])] == codes.tolist()
    assert page.locator(".change").is_hidden()
    page.click(".curl")
    expect(page.locator(".command")).to_contain_text("v1/images/codes")
    generate_on_page(page, "strict", "ar")
    expect(page.locator("#status")).to_contain_text("Same image, byte for byte.")
