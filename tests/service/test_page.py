"""Test the page of `lantern-rt serve` in a browser: what a person sees and can do there."""

from __future__ import annotations

import base64
import json
import re
from itertools import combinations
from threading import Thread

import pytest
from browser_page import (
    CODES,
    IN_A_BROWSER,
    PHONE,
    REMEMBERED,
    SECONDS,
    decode_image,
    download_image,
    draw,
    read_figures,
)
from playwright.sync_api import Page, Route, expect
from running_server import GENERATIONS, RunningServer, wait_until

from lantern_rt import open_bundle
from lantern_rt.text.words import ANY_WORDS

pytestmark = IN_A_BROWSER


def test_an_image_grows_before_it_is_done(page: Page) -> None:
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
    table = read_figures(page)
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


def test_exact_methods_give_the_same_image_and_are_compared(page: Page) -> None:
    draw(page, "sjd", "ar")
    expect(page.locator("#status")).to_contain_text(re.compile("(times|about) as fast as"))
    expect(page.locator("#status")).to_contain_text("Same image, byte for byte.")
    table = read_figures(page)
    assert table["nothing drafted"][1] == str(CODES)
    drafted, plain = map(float, table["Tokens per forward pass"])
    assert drafted > 1 >= plain > 0.9  # passes that settle ties count, too


def test_a_method_is_not_faster_than_itself(page: Page) -> None:
    draw(page, "ar", "ar")
    expect(page.locator("#status")).to_have_text("The same method twice: ar. Same image, byte for byte.")
    assert "Speed-up" not in read_figures(page)


@pytest.mark.parametrize(
    ("seconds", "words", "factors"),
    [
        ((1.0, 2.0), "fast was 2.00 times as fast as ar.", ["2.00", "1.00"]),
        ((2.0, 1.6), "ar was 1.25 times as fast as fast.", ["1.00", "1.25"]),
        ((2.0, 1.92), "fast was about as fast as ar.", []),
        ((1.92, 2.0), "fast was about as fast as ar.", []),
    ],
)
def test_times_are_compared_where_they_differ(
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


def test_a_relaxed_method_may_draw_another_image(page: Page) -> None:
    page.select_option("#method", "lantern++")
    page.fill("#method-parameters", "lambda=3")
    draw(page, "lantern++", "ar")
    expect(page.locator("#status")).to_contain_text("Different images: relaxed acceptance may change them.")
    assert float(read_figures(page)["Realised TVD per token"][0]) > 0
    expect(page.locator("h2").first).to_have_text("lantern++:lambda=3")


def test_cancelling_stops_the_image_and_frees_the_server(page: Page, scenes: RunningServer) -> None:
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
    wait_until(lambda: scenes.metric("lantern_images_running", model="scenes") == 0)


def test_an_unknown_word_gets_the_servers_own_message(page: Page) -> None:
    page.fill("#prompt", "a red dragon")
    with page.expect_response(re.compile("generations")) as response:
        page.click("#draw")
    error = response.value.json()["error"]
    expect(page.locator("#error")).to_have_text(error["message"].partition("; ")[0])
    expect(page.locator("#error")).to_contain_text("dragon")
    expect(page.locator("#any-words")).to_have_text(ANY_WORDS)
    expect(page.locator("#draw")).to_be_enabled()
    assert page.locator("#suggestions button").all_inner_texts() == error["suggestions"]
    page.click("#suggestions button >> nth=1")
    expect(page.locator("#status")).to_contain_text("Done in", timeout=1000 * SECONDS)
    expect(page.locator(".subject")).to_have_text(error["suggestions"][1])
    expect(page.locator("#error")).to_be_hidden()
    expect(page.locator("#suggestions")).to_be_hidden()


def test_every_request_has_a_new_seed_until_one_is_kept(page: Page) -> None:
    def request_seed() -> int:
        with page.expect_request(re.compile("generations")) as request:
            draw(page, "sjd")
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
    page.fill("#seed", "77")  # a seed that is typed is meant
    assert request_seed() == 77


def test_several_images_are_those_of_one_request_of_the_api(page: Page, scenes: RunningServer) -> None:
    assert page.locator("#count").get_attribute("max") == "10"
    page.fill("#seed", "5")
    page.fill("#count", "3")
    draw(page, "sjd")
    expect(page.locator("#status")).to_contain_text("3 images in ")
    assert page.locator("h2:visible").all_inner_texts()[:3] == ["Seed 5", "Seed 6", "Seed 7"]
    body = {"prompt": page.input_value("#prompt"), "method": "sjd", "seed": 5, "n": 3}
    for i, image in enumerate(scenes.post(body)[1]["data"]):
        assert (decode_image(download_image(page, i)) == decode_image(base64.b64decode(image["b64_json"]))).all()
    assert page.locator("#history button").count() == 3
    page.click(".stage >> nth=1")
    expect(page.locator(".panel")).to_have_count(1)
    expect(page.locator(".how")).to_contain_text("Seed 6")
    page.select_option("#other", "ar")
    expect(page.locator("#count")).to_be_disabled()


def test_an_earlier_image_is_shown_again_with_its_figures(page: Page) -> None:
    draw(page, "sjd")
    expect(page.locator("#history")).to_be_hidden()
    first_figures = read_figures(page)
    seed = page.input_value("#seed")
    page.fill("#prompt", "a green cube on grass")
    draw(page, "ar")
    assert read_figures(page) != first_figures
    thumbnails = page.locator("#history button")
    assert [thumbnail.get_attribute("aria-current") for thumbnail in thumbnails.all()] == ["true", "false"]
    name = f"a matte pink ball in the center at night, seed {seed}"
    page.get_by_role("button", name=name).focus()
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text(name)
    expect(page.locator(".subject")).to_have_text("a matte pink ball in the center at night")
    assert read_figures(page) == first_figures
    assert [thumbnail.get_attribute("aria-current") for thumbnail in thumbnails.all()] == ["false", "true"]
    assert decode_image(download_image(page)).shape == (256, 256, 3)


def test_the_oldest_images_are_forgotten_and_their_memory_is_freed(page: Page, scenes: RunningServer) -> None:
    asked = {"prompt": "a cube", "seed": 1, "stream": True, "steps": True}
    headers = {"content-type": "application/json"}
    _, _, body = scenes.request("POST", GENERATIONS, json.dumps(asked).encode(), headers)
    page.route("**/generations", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.evaluate("const free = URL.revokeObjectURL; URL.revokeObjectURL = (url) => { freed.add(url); free(url); };"
                  "window.freed = new Set();")  # fmt: skip
    addresses = []
    for i in range(REMEMBERED + 2):
        draw(page)
        addresses.append(page.locator(".stage img").get_attribute("src"))
        if i == 1:
            page.click("#history button >> nth=1")  # stays in sight
    assert page.locator("#history button").count() == REMEMBERED
    page.click(f"#history button >> nth={REMEMBERED - 1}")
    expect(page.locator(".stage img")).to_have_attribute("src", addresses[2])
    assert page.evaluate("[...freed].filter(Boolean)") == addresses[:2]


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_fields_and_labels_have_room(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.click("summary:visible")
    page.fill("#seed", "4294967295")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    for first_box in page.locator(".field input:visible, .field label:visible").all():
        assert first_box.evaluate("one => one.scrollWidth <= one.clientWidth"), first_box.inner_text()
    boxes = [first_box.bounding_box() for first_box in page.locator(".sampling label").all()]
    assert len(boxes) == 4
    for first_box, second_box in combinations(boxes, 2):
        assert first_box["y"] != second_box["y"] or abs(first_box["x"] - second_box["x"]) >= first_box["width"] + 8


def test_a_key_is_asked_for_where_the_server_wants_one(page: Page) -> None:
    def guard(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            return route.continue_()
        return route.fulfill(status=401, json={"error": {"message": "wrong key"}})

    page.route("**/v1/**", guard)
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
    draw(page)
    page.click(".curl")
    expect(page.locator(".command")).to_contain_text("Bearer $LANTERN_RT_API_KEY")


def test_models_can_be_chosen_and_those_of_classes_take_a_class_id(page: Page, scenes: RunningServer) -> None:
    models = scenes.get("/v1/models")[1]["data"]
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


def test_the_curl_command_draws_the_image_that_is_saved(page: Page, scenes: RunningServer) -> None:
    page.fill("#seed", "7")
    draw(page, "sjd")
    with page.expect_download() as download:
        page.click(".save")
    assert download.value.suggested_filename == "scenes-7.png"
    page.click(".curl")
    command = page.inner_text(".command")
    assert f"{scenes.url}/v1/images/generations" in command
    _, response = scenes.post(json.loads(re.findall(r"-d '(.*?)' \|", command, re.DOTALL)[0]))
    encoded_image = response["data"][0]["b64_json"]
    assert download.value.path().read_bytes() == base64.b64decode(encoded_image)


def test_a_phone_shows_everything_in_its_width_and_large_enough_to_touch(phone: Page) -> None:
    draw(phone, "sjd", "ar")
    stage = phone.locator(".stage").first.bounding_box()
    form = phone.locator("#form").bounding_box()
    assert form["y"] + form["height"] < stage["y"], "the form comes first"
    assert 0 < stage["y"] < PHONE["viewport"]["height"] / 2, "the page scrolls to the image"
    phone.click(".curl >> nth=0")
    assert phone.evaluate("document.documentElement.scrollWidth") == 390
    targets = phone.locator("button:visible, select:visible, input:not([type=checkbox]):visible, a:visible").all()
    assert len(targets) > 8
    assert min(target.bounding_box()["height"] for target in targets) >= 44
