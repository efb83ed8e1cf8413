"""The page of `lantern-rt serve` in a browser: what a person sees there, and can do."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from PIL import Image

playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
from playwright.sync_api import Browser, Page, Route, expect  # noqa: E402
from running_server import RunningServer, until  # noqa: E402

from lantern_rt import open_bundle  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NEEDED = "needs Chromium, as in Debian's package `chromium`"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=NEEDED)]
QUIET = ("--disable-background-networking --disable-component-update --disable-gpu --disable-quic --disable-sync "
         "--no-first-run --no-sandbox")  # fmt: skip
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
CODES, SECONDS = 256, 60


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium with a new, empty profile."""
    with playwright.sync_playwright() as programs:
        browser = programs.chromium.launch(executable_path=CHROMIUM, args=QUIET.split())
        yield browser
        browser.close()


@pytest.fixture
def page(scenes: RunningServer, browser: Browser) -> Iterator[Page]:
    """The page, ready to draw; whatever a test does, no request leaves the server and no script fails."""
    yield from visit(f"{scenes.url}/", browser)


@pytest.fixture
def phone(scenes: RunningServer, browser: Browser) -> Iterator[Page]:
    """The same on a phone."""
    yield from visit(f"{scenes.url}/", browser, **PHONE)


def visit(server: str, browser: Browser, **options: object) -> Iterator[Page]:
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


def figures(page: Page) -> dict[str, list[str]]:
    """The table, by the names of its rows."""
    rows = page.locator("#figures tbody tr").all()
    return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows}


def test_a_picture_grows_before_it_is_done(page: Page) -> None:
    page.evaluate("""() => {
        window.seen = new Set();
        const look = () => window.seen.add(document.querySelector(".stage img")?.src ?? "");
        new MutationObserver(look).observe(document.body, { subtree: true, childList: true, attributes: true });
    }""")
    draw(page, "ar")
    expect(page.locator("#status")).to_contain_text("Done in")
    expect(page.locator(".count")).to_have_text(f"{CODES} of {CODES} tokens")
    assert page.evaluate("window.seen.size") > 4
    assert (
        page.locator(".stage img").evaluate("image => image.naturalWidth") == open_bundle("scenes").manifest.image_width
    )


def test_map_and_statistics_tell_how_the_codes_came_to_be(page: Page) -> None:
    draw(page, "sjd")
    table = figures(page)
    kinds = ["drafted and accepted", "accepted by relaxation", "draft rejected, resampled", "nothing drafted"]
    assert list(table)[:4] == kinds
    assert sum(int(table[kind][0]) for kind in kinds) == CODES
    assert int(table["drafted and accepted"][0]) > 0
    assert table["accepted by relaxation"] == table["Realised TVD per token"] == ["0"]
    assert float(table["Tokens per forward pass"][0]) == pytest.approx(CODES / int(table["Target passes"][0]), abs=0.01)
    assert page.locator(".map").get_attribute("aria-label").startswith(f"Map of {CODES} tokens: ")
    expect(page.locator(".how")).to_contain_text("sjd:window=")
    assert page.locator("#method option").all_inner_texts()[:3] == ["strict: exact", "balanced", "fast"]
    expect(page.locator(".over")).to_be_hidden()
    page.check("#overlay")
    expect(page.locator(".over")).to_be_visible()


def test_exact_methods_give_the_same_picture_and_are_compared(page: Page) -> None:
    draw(page, "sjd", "ar")
    expect(page.locator("#status")).to_contain_text("times as fast as")
    expect(page.locator("#status")).to_contain_text("Same image, byte for byte.")
    table = figures(page)
    assert table["nothing drafted"][1] == str(CODES)
    drafted, plain = map(float, table["Tokens per forward pass"])
    assert drafted > 1 >= plain > 0.9  # passes that settle ties count, too
    assert "1.00" in table["Speed-up"]


def test_a_relaxed_method_may_draw_another_picture(page: Page) -> None:
    page.select_option("#method", "lantern++")
    page.fill("#method-parameters", "lambda=3")
    draw(page, "lantern++", "ar")
    expect(page.locator("#status")).to_contain_text("Different images: relaxed acceptance may change them.")
    assert float(figures(page)["Realised TVD per token"][0]) > 0
    expect(page.locator("h2").first).to_have_text("lantern++:lambda=3")


def test_cancelling_stops_the_picture_and_frees_the_server(page: Page, scenes: RunningServer) -> None:
    page.select_option("#method", "ar")
    others = Thread(target=scenes.post, args=({"prompt": "a cube", "method": "ar", "n": 3},))
    others.start()  # beside which it is slow, but does not wait
    page.click("#draw")
    expect(page.locator(".count")).not_to_have_text(f"0 of {CODES} tokens")
    for key in ("Enter", "Space"):  # on the button, which keeps the focus
        page.keyboard.press(key)
    expect(page.locator("#status")).to_have_text("Generating with ar")
    page.click("#cancel")
    expect(page.locator("#status")).to_have_text("Cancelled")
    assert int(page.locator(".count").inner_text().split()[0]) < CODES
    others.join()
    until(lambda: scenes.metric("lantern_images_running", model="scenes") == 0)


def test_an_unknown_word_gets_the_servers_own_message(page: Page) -> None:
    page.fill("#prompt", "a red dragon")
    with page.expect_response(re.compile("generations")) as answer:
        page.click("#draw")
    expect(page.locator("#error")).to_have_text(answer.value.json()["error"]["message"])
    expect(page.locator("#error")).to_contain_text("dragon")
    expect(page.locator("#draw")).to_be_enabled()


def test_a_key_is_asked_for_where_the_server_wants_one(page: Page) -> None:
    def guard(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            return route.continue_()
        return route.fulfill(status=401, json={"error": {"message": "wrong key"}})

    page.route("**/v1/**", guard)
    page.reload()
    expect(page.locator("#error")).to_have_text("wrong key")
    expect(page.locator("#form")).to_be_hidden()
    page.keyboard.type("secret")
    page.keyboard.press("Enter")
    expect(page.locator("#draw")).to_be_enabled()
    draw(page)
    page.click(".curl")
    expect(page.locator(".command")).to_contain_text("Bearer $LANTERN_API_KEY")


def test_models_can_be_chosen_and_those_of_classes_take_a_class_id(page: Page, scenes: RunningServer) -> None:
    known = scenes.get("/v1/models")[1]["data"]
    classes = {"takes": "class", "classes": 1000, "methods": ["ar", "sjd"], "examples": []}
    known.append(known[0] | {"id": "classes", "lantern": known[0]["lantern"] | classes})
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": known}))
    page.reload()
    page.select_option("#model", "classes")
    expect(page.locator("#prompt")).to_be_hidden()
    page.fill("#class-id", "207")
    page.click("summary")
    page.fill("#temperature", "0.9")
    page.select_option("#method", "ar")
    with page.expect_request(re.compile("generations")) as request:
        page.click("#draw")
    asked = {"model": "classes", "class_id": 207, "method": "ar", "seed": 1, "temperature": 0.9}
    assert request.value.post_data_json == asked | {"stream": True, "steps": True, "partial_images": 15}
    expect(page.locator("#error")).to_contain_text("model: found 'classes'")


def test_the_curl_command_draws_the_picture_that_is_saved(page: Page, scenes: RunningServer) -> None:
    page.fill("#seed", "7")
    draw(page, "sjd")
    with page.expect_download() as download:
        page.click(".save")
    assert download.value.suggested_filename == "scenes-7.png"
    page.click(".curl")
    command = page.inner_text(".command")
    assert f"{scenes.url}/v1/images/generations" in command
    _, answer = scenes.post(json.loads(re.findall(r"-d '(.*?)' \|", command, re.DOTALL)[0]))
    picture = answer["data"][0]["b64_json"]
    assert download.value.path().read_bytes() == base64.b64decode(picture)


def change(page: Page) -> bytes:
    """Paint over the middle of the picture, have it drawn anew, and save it."""
    page.locator(".mask").scroll_into_view_if_needed()
    box = page.locator(".mask").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()
    with page.expect_response(re.compile("edits")):
        page.click(".redraw")
    expect(page.locator("#cancel")).to_be_hidden(timeout=1000 * SECONDS)
    expect(page.locator("#status")).to_contain_text("Done in")
    with page.expect_download() as download:
        page.click(".save")
    return download.value.path().read_bytes()


def test_a_part_that_is_painted_over_is_drawn_anew(page: Page, phone: Page) -> None:
    for one in (page, phone):
        draw(one, "sjd")
        before = read(base64.b64decode(one.locator(".stage img").get_attribute("src").partition(",")[2]))
        one.fill("#seed", "8")
        one.click(".change")
        after = read(change(one))
        assert (after != before).any(2)[112:144, 112:144].mean() > 0.5
        assert (after == before)[:48].all()
        assert 0 < int(figures(one)["preserved by the edit"][0]) < CODES - 12
        assert one.evaluate("document.documentElement.scrollWidth") <= one.viewport_size["width"]


def test_a_picture_of_ones_own_is_changed(page: Page, tmp_path: Path) -> None:
    Image.new("RGB", (300, 200), (90, 160, 60)).save(tmp_path / "own.jpg")
    page.set_input_files("#open", tmp_path / "own.jpg")
    expect(page.locator(".painting")).to_be_visible()
    assert (np.abs(read(change(page))[:40].astype(int) - (90, 160, 60)) < 4).all()


def read(file: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))


def test_a_phone_shows_everything_in_its_width_and_large_enough_to_touch(phone: Page) -> None:
    draw(phone, "sjd", "ar")
    stage = phone.locator(".stage").first.bounding_box()
    assert 0 <= stage["y"] < phone.locator("#form").bounding_box()["y"], "the picture comes first, and is seen"
    assert stage["y"] < PHONE["viewport"]["height"] / 2
    phone.click(".curl >> nth=0")
    assert phone.evaluate("document.documentElement.scrollWidth") == 390
    targets = phone.locator("button:visible, select:visible, input:not([type=checkbox]):visible, a:visible").all()
    assert len(targets) > 8
    assert min(target.bounding_box()["height"] for target in targets) >= 44
