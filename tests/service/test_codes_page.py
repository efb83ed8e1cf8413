"""The page of `lantern-rt serve` with a bundle that gives codes: a map of the codes, and a file of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from browser_page import IN_A_BROWSER, download_image, draw, open_page
from playwright.sync_api import Page, expect
from running_server import RunningServer

from lantern_rt import Pipeline

pytestmark = IN_A_BROWSER


@pytest.fixture
def codes_page(start: Callable[..., RunningServer], glm_image_bundle: Path, browser: Any) -> Iterator[Page]:
    yield from open_page(f"{start(glm_image_bundle, '--threads', 1).url}/", browser)


def test_the_page_draws_and_saves_the_codes_of_a_bundle_without_pixels(
    codes_page: Page, glm_image_bundle: Path
) -> None:
    page = codes_page
    page.fill("#prompt", "a red fox")
    page.fill("#seed", "7")
    page.select_option("#size", "160x96")
    draw(page, "strict")
    expect(page.locator("#status")).to_contain_text("Done in")
    expect(page.locator(".count")).to_have_text("255 of 255 tokens")
    assert page.locator(".stage img").evaluate("image => [image.naturalWidth, image.naturalHeight]") == [40, 24]
    (codes,) = Pipeline.from_bundle(glm_image_bundle, threads=1)("a red fox", seed=7, size="160x96").codes
    codes_file = json.loads(download_image(page))
    assert [*chain(*codes_file["first_codes"], *codes_file["codes"])] == codes.tolist()
    assert page.locator(".change").is_hidden()
    page.click(".curl")
    expect(page.locator(".command")).to_contain_text("v1/images/codes")
    draw(page, "strict", "ar")
    expect(page.locator("#status")).to_contain_text("Same image, byte for byte.")
