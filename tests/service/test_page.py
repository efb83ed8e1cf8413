"""Test the web page of `lantern-rt serve` in Chromium: generation, comparison, history, keys and layout."""

from __future__ import annotations

import base64
import json
import re
from itertools import combinations
from threading import Thread

import pytest
from browser_page import (
    BROWSER_MARKS,
    MAX_HISTORY_IMAGES,
    MAX_SECONDS,
    NUM_CODES,
    PHONE,
    decode_image,
    download_image,
    generate_on_page,
    read_statistics,
)
from playwright.sync_api import Page, Route, expect
from running_server import GENERATIONS, JSON, RunningServer, wait_until

from lantern_rt import open_bundle
from lantern_rt.text.words import ANY_WORDS_SERVED

pytestmark = BROWSER_MARKS


def test_the_page_shows_partial_images_during_generation(page: Page) -> None:
    page.evaluate("""() => {
        window.seen = new Set();
        const look = () => window.seen.add(document.querySelector(".stage img")?.src ?? "");
        new MutationObserver(look).observe(document.body, { subtree: true, childList: true, attributes: true });
    }""")
    generate_on_page(page, "ar")
    expect(page.locator("#status")).to_contain_text("Done in")
    expect(page.locator(".count")).to_have_text(f"{NUM_CODES} of {NUM_CODES} tokens")
    assert page.evaluate("window.seen.size") > 4
    width = page.locator(".stage img").evaluate("image => image.naturalWidth")
    assert width == open_bundle("scenes").manifest.image_width


def test_the_map_and_the_table_show_how_the_codes_were_generated(page: Page) -> None:
    generate_on_page(page, "sjd")
    table = read_statistics(page)
    kind_names = ["drafted and accepted", "accepted by relaxation", "draft rejected, resampled", "nothing drafted"]
    assert list(table)[:4] == kind_names
    assert sum(int(table[name][0]) for name in kind_names) == NUM_CODES
    assert int(table["drafted and accepted"][0]) > 0
    assert table["accepted by relaxation"] == table["Change per token (TVD)"] == ["0"]
    passes = int(table["Target passes"][0])
    assert float(table["Tokens per forward pass"][0]) == pytest.approx(NUM_CODES / passes, abs=0.01)
    assert page.locator(".map").get_attribute("aria-label").startswith(f"Map of {NUM_CODES} tokens: ")
    expect(page.locator(".how")).to_contain_text("sjd:window=")
    assert page.locator("#method option").all_inner_texts()[:3] == ["strict: exact", "balanced", "fast"]
    expect(page.locator(".over")).to_be_hidden()
    page.check("#overlay")
    expect(page.locator(".over")).to_be_visible()


def test_two_exact_methods_are_compared_and_give_the_same_image(page: Page) -> None:
    generate_on_page(page, "sjd", "ar")
    expect(page.locator("#status")).to_contain_text(re.compile("(times|about) as fast as"))
    expect(page.locator("#status")).to_contain_text("Same image, byte for byte.")
    table = read_statistics(page)
    assert table["nothing drafted"][1] == str(NUM_CODES)
    sjd_rate, ar_rate = map(float, table["Tokens per forward pass"])
    assert sjd_rate > 1 >= ar_rate > 0.9  # below 1, as a tie of two tokens takes another forward pass


def test_comparing_a_method_with_itself_shows_no_speed_up(page: Page) -> None:
    generate_on_page(page, "ar", "ar")
    expect(page.locator("#status")).to_have_text("The same method twice: ar. Same image, byte for byte.")
    assert "Speed-up" not in read_statistics(page)


@pytest.mark.parametrize(
    ("seconds", "words", "factors"),
    [
        ((1.0, 2.0), "fast was about 2.0 times as fast as ar.", ["2.00", "1.00"]),
        ((2.0, 1.6), "ar was about 1.3 times as fast as fast.", ["1.00", "1.25"]),
        ((2.0, 1.92), "fast was about as fast as ar.", []),
        ((1.92, 2.0), "fast was about as fast as ar.", []),
    ],
)
def test_the_page_shows_a_speed_up_only_if_the_times_differ_clearly(
    page: Page, seconds: tuple[float, float], words: str, factors: list[str]
) -> None:
    sentence, factor_row = page.evaluate(
        """async (seconds) => {
            const { compared, rows } = await import("/page/figures.js");
            const images = ["fast", "ar"].map((label, i) => ({ label, kinds: "nn", png: btoa("12345678"), figures: {
                method: label, seconds: seconds[i], tokens_per_forward_pass: 1, target_passes: 2 } }));
            const table = document.createElement("table");
            table.append(...rows(images));
            const line = [...table.rows].find((row) => row.textContent.startsWith("Speed-up"));
            return [compared(...images), [...line?.cells ?? []].slice(1).map((cell) => cell.textContent)];
        }""",
        seconds,
    )
    assert sentence == f"{words} Same image, byte for byte."
    assert factor_row == factors


def test_the_page_reports_that_a_relaxed_method_gave_a_different_image(page: Page) -> None:
    page.select_option("#method", "lantern++")
    page.fill("#method-parameters", "lambda=3")
    generate_on_page(page, "lantern++", "ar")
    expect(page.locator("#status")).to_contain_text("Different images: relaxed acceptance may change them.")
    assert float(read_statistics(page)["Change per token (TVD)"][0]) > 0
    expect(page.locator("h2").first).to_have_text("lantern++:lambda=3")


def test_the_cancel_button_stops_the_generation_on_the_server(page: Page, scenes_server: RunningServer) -> None:
    page.select_option("#method", "ar")
    # Three other images fill the batch, so that the image of the page is generated slowly.
    other_request = Thread(target=scenes_server.post, args=({"prompt": "a cube", "method": "ar", "n": 3},))
    other_request.start()
    page.click("#draw")
    expect(page.locator(".count")).not_to_have_text(f"0 of {NUM_CODES} tokens")
    for key in ("Enter", "Space"):  # the focused button Generate must ignore both keys during generation
        page.keyboard.press(key)
    expect(page.locator("#status")).to_have_text("Generating with ar")
    page.click("#cancel")
    expect(page.locator("#status")).to_have_text("Cancelled")
    assert int(page.locator(".count").inner_text().split()[0]) < NUM_CODES
    other_request.join()
    wait_until(lambda: scenes_server.read_metric("lantern_images_running", model="scenes") == 0)


def test_a_prompt_with_an_unknown_word_shows_the_error_of_the_server_and_suggestions(page: Page) -> None:
    page.fill("#prompt", "a red dragon")
    with page.expect_response(re.compile("generations")) as response:
        page.click("#draw")
    error = response.value.json()["error"]
    expect(page.locator("#error")).to_have_text(error["message"].partition("; ")[0])
    expect(page.locator("#error")).to_contain_text("dragon")
    expect(page.locator("#any-words")).to_have_text(ANY_WORDS_SERVED)
    expect(page.locator("#draw")).to_be_enabled()
    assert page.locator("#suggestions button").all_inner_texts() == error["suggestions"]
    page.click("#suggestions button >> nth=1")
    expect(page.locator("#status")).to_contain_text("Done in", timeout=1000 * MAX_SECONDS)
    expect(page.locator(".subject")).to_have_text(error["suggestions"][1])
    expect(page.locator("#error")).to_be_hidden()
    expect(page.locator("#suggestions")).to_be_hidden()


def test_every_request_has_a_new_seed_until_the_user_keeps_or_enters_a_seed(page: Page) -> None:
    def request_seed() -> int:
        with page.expect_request(re.compile("generations")) as request:
            generate_on_page(page, "sjd")
        seed = request.value.post_data_json["seed"]
        assert page.input_value("#seed") == str(seed)
        expect(page.locator(".how")).to_contain_text(f"Seed {seed}, sjd")
        return seed

    first_seed = request_seed()
    second_seed = request_seed()
    assert first_seed != second_seed
    page.click(".keep")
    expect(page.locator("#random")).not_to_be_checked()
    assert request_seed() == second_seed
    page.fill("#seed", "")
    page.check("#random")
    page.fill("#seed", "77")  # an entered seed turns random seeds off
    assert request_seed() == 77


def test_several_images_on_the_page_equal_those_of_an_api_request(page: Page, scenes_server: RunningServer) -> None:
    assert page.locator("#count").get_attribute("max") == "10"
    page.fill("#seed", "5")
    page.fill("#count", "3")
    generate_on_page(page, "sjd")
    expect(page.locator("#status")).to_contain_text("3 images in ")
    assert page.locator("h2:visible").all_inner_texts()[:3] == ["Seed 5", "Seed 6", "Seed 7"]
    body = {"prompt": page.input_value("#prompt"), "method": "sjd", "seed": 5, "n": 3}
    for i, image in enumerate(scenes_server.post(body)[1]["data"]):
        assert (decode_image(download_image(page, i)) == decode_image(base64.b64decode(image["b64_json"]))).all()
    assert page.locator("#history button").count() == 3
    page.click(".stage >> nth=1")
    expect(page.locator(".panel")).to_have_count(1)
    expect(page.locator(".how")).to_contain_text("Seed 6")
    page.select_option("#other", "ar")
    expect(page.locator("#count")).to_be_disabled()


def test_selecting_an_earlier_image_shows_the_image_with_its_statistics(page: Page) -> None:
    first_prompt = page.input_value("#prompt")
    generate_on_page(page, "sjd")
    expect(page.locator("#history")).to_be_hidden()
    first_figures = read_statistics(page)
    seed = page.input_value("#seed")
    page.fill("#prompt", "a green cube on grass")
    generate_on_page(page, "ar")
    assert read_statistics(page) != first_figures
    thumbnails = page.locator("#history button")
    assert [thumbnail.get_attribute("aria-current") for thumbnail in thumbnails.all()] == ["true", "false"]
    name = f"{first_prompt}, seed {seed}"
    page.get_by_role("button", name=name).focus()
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text(name)
    expect(page.locator(".subject")).to_have_text(first_prompt)
    assert read_statistics(page) == first_figures
    assert [thumbnail.get_attribute("aria-current") for thumbnail in thumbnails.all()] == ["false", "true"]
    assert decode_image(download_image(page)).shape == (256, 256, 3)


def test_the_oldest_images_leave_the_history_and_their_memory(page: Page, scenes_server: RunningServer) -> None:
    fields = json.dumps({"prompt": "a cube", "seed": 1, "stream": True, "steps": True}).encode()
    _, _, body = scenes_server.request("POST", GENERATIONS, fields, JSON)
    page.route("**/generations", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.evaluate("const free = URL.revokeObjectURL; URL.revokeObjectURL = (url) => { freed.add(url); free(url); };"
                  "window.freed = new Set();")  # fmt: skip
    addresses = []
    for i in range(MAX_HISTORY_IMAGES + 2):
        generate_on_page(page)
        addresses.append(page.locator(".stage img").get_attribute("src"))
        if i == 1:
            page.click("#history button >> nth=1")  # the first image stays on display
    assert page.locator("#history button").count() == MAX_HISTORY_IMAGES
    page.click(f"#history button >> nth={MAX_HISTORY_IMAGES - 1}")
    expect(page.locator(".stage img")).to_have_attribute("src", addresses[2])
    assert page.evaluate("[...freed].filter(Boolean)") == addresses[:2]


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_no_field_or_label_overflows_or_overlaps_at_common_screen_widths(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.click("summary:visible")
    page.fill("#seed", "4294967295")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    for element in page.locator(".field input:visible, .field label:visible").all():
        assert element.evaluate("node => node.scrollWidth <= node.clientWidth"), element.inner_text()
    boxes = [label.bounding_box() for label in page.locator(".sampling label").all()]
    assert len(boxes) == 4
    for first_box, second_box in combinations(boxes, 2):
        assert first_box["y"] != second_box["y"] or abs(first_box["x"] - second_box["x"]) >= first_box["width"] + 8


def test_a_reload_keeps_the_form(page: Page) -> None:
    page.fill("#prompt", "a red cube")
    page.select_option("#method", "sjd")
    page.fill("#method-parameters", "window=3")
    page.uncheck("#random")
    page.fill("#seed", "12")
    page.reload()
    expect(page.locator("#draw")).to_be_enabled()
    page.click("#draw")
    expect(page.locator(".how")).to_have_text("Seed 12, sjd:window=3")
    expect(page.locator(".subject")).to_have_text("a red cube")


def test_the_example_request_of_the_api_page_shows_an_image(page: Page) -> None:
    page.goto(f"{page.url}docs")
    expect(page.locator("#body")).to_have_value(re.compile('"prompt":".+","seed":1'))
    page.click("button")
    expect(page.locator("#answer")).to_contain_text('"output_format":"png"', timeout=60_000)
    assert page.locator("#image").evaluate("image => image.decode().then(() => image.naturalWidth)") == 256
    page.fill("#body", '{"prompt": "a red house"}')
    page.click("button")
    expect(page.locator("#answer")).to_contain_text("prompt")


def test_the_page_asks_for_an_api_key_if_the_server_requires_a_key(page: Page) -> None:
    def require_key(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            return route.continue_()
        return route.fulfill(status=401, json={"error": {"message": "wrong key"}})

    page.route("**/v1/**", require_key)
    page.reload()
    expect(page.locator("#status")).to_have_text("This server requires an API key")
    expect(page.locator("#error")).to_be_hidden()
    expect(page.locator("#form")).to_be_hidden()
    for key in ("guess", "secret"):
        page.fill("#key", key)
        page.keyboard.press("Enter")
        if key == "guess":
            expect(page.locator("#error")).to_have_text("wrong key")
    expect(page.locator("#draw")).to_be_enabled()
    generate_on_page(page)
    page.click(".curl")
    expect(page.locator(".command")).to_contain_text("Bearer $LANTERN_RT_API_KEY")


def test_a_class_conditional_model_can_be_selected_with_a_class_id(page: Page, scenes_server: RunningServer) -> None:
    models = scenes_server.get("/v1/models")[1]["data"]
    classes = {"takes": "class", "classes": 1000, "methods": ["ar", "sjd"], "examples": []}
    models.append(models[0] | {"id": "classes", "lantern": models[0]["lantern"] | classes})
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": models}))
    page.reload()
    page.select_option("#model", "classes")
    expect(page.locator("#prompt")).to_be_hidden()
    page.fill("#class-id", "207")
    page.click("summary:visible")
    page.fill("#temperature", "0.9")
    page.fill("#seed", "1")
    page.select_option("#method", "ar")
    with page.expect_request(re.compile("generations")) as request:
        page.click("#draw")
    expected_body = {"model": "classes", "class_id": 207, "method": "ar", "seed": 1, "temperature": 0.9}
    assert request.value.post_data_json == expected_body | {"stream": True, "steps": True, "partial_images": 15}
    expect(page.locator("#error")).to_contain_text("model: found 'classes'")


def test_the_curl_command_generates_the_image_that_the_page_saves(page: Page, scenes_server: RunningServer) -> None:
    page.fill("#seed", "7")
    generate_on_page(page, "sjd")
    with page.expect_download() as download:
        page.click(".save")
    assert download.value.suggested_filename == "scenes-7.png"
    page.click(".curl")
    command = page.inner_text(".command")
    assert f"{scenes_server.url}/v1/images/generations" in command
    _, response = scenes_server.post(json.loads(re.findall(r"-d '(.*?)' \|", command, re.DOTALL)[0]))
    encoded_image = response["data"][0]["b64_json"]
    assert download.value.path().read_bytes() == base64.b64decode(encoded_image)


def test_on_a_phone_the_page_fits_the_width_and_controls_are_large_enough_to_touch(phone_page: Page) -> None:
    generate_on_page(phone_page, "sjd", "ar")
    stage = phone_page.locator(".stage").first.bounding_box()
    form = phone_page.locator("#form").bounding_box()
    assert form["y"] + form["height"] < stage["y"], "the form comes first"
    assert 0 < stage["y"] < PHONE["viewport"]["height"] / 2, "the page scrolls to the image"
    phone_page.click(".curl >> nth=0")
    assert phone_page.evaluate("document.documentElement.scrollWidth") == 390
    targets = phone_page.locator("button:visible, select:visible, input:not([type=checkbox]):visible, a:visible").all()
    assert len(targets) > 8
    assert min(target.bounding_box()["height"] for target in targets) >= 44
