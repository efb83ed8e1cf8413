"""Test that the official Python client of OpenAI works with a running server."""

from __future__ import annotations

import asyncio
import base64
import io
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image
from running_server import EDITS, RunningServer, wait_until

from lantern_rt import Pipeline, RequestError
from lantern_rt.output.formats import IMAGE_FORMATS, PNG
from lantern_rt.output.images import GREY, attach_recipe
from lantern_rt.serve.protocol import HttpError, ImagesRequest

PROMPT = "a large red sphere left of a small blue cube on grass"


def make_client(server: RunningServer, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", **options)


@pytest.fixture(scope="module")
def scenes_client(scenes_server: RunningServer) -> Iterator[openai.OpenAI]:
    with make_client(scenes_server) as opened_client:
        yield opened_client


@pytest.fixture(scope="module")
def tiny_client(tiny_server: RunningServer) -> Iterator[openai.OpenAI]:
    with make_client(tiny_server, max_retries=0) as opened_client:
        yield opened_client


def decode_file(image_data: Any) -> bytes:
    return base64.b64decode(image_data.b64_json)


def decode_pixels(file: bytes) -> Any:
    with Image.open(io.BytesIO(file)) as image:
        return np.asarray(image.convert("RGB"))


def test_a_generated_image_is_the_same_png_file_as_from_the_pipeline(
    scenes_client: openai.OpenAI, scenes_pipe: Pipeline
) -> None:
    expected = scenes_pipe(PROMPT, seed=5, method="ar").images[0]
    size = f"{expected.width}x{expected.height}"
    response = scenes_client.images.generate(prompt=PROMPT, size=size, extra_body={"seed": 5, "method": "ar"})
    assert decode_file(response.data[0]) == PNG.encode_image(expected)
    assert (response.output_format, response.size, response.background) == ("png", size, "opaque")
    assert response.usage is not None
    assert response.usage.output_tokens == 256
    assert response.usage.total_tokens == 256 + response.usage.input_tokens
    assert response.usage.input_tokens_details.text_tokens == scenes_pipe.bundle.manifest.condition.prefix


def test_each_quality_generates_the_image_of_the_matching_preset(
    scenes_client: openai.OpenAI, scenes_pipe: Pipeline
) -> None:
    presets = scenes_pipe.bundle.manifest.presets
    assert presets
    for quality, preset in presets.items():
        response = scenes_client.images.generate(prompt=PROMPT, extra_body={"seed": 2, "quality_budget": quality})
        openai_quality = {"fast": "low", "balanced": "medium", "strict": "high"}[quality]
        openai_response = scenes_client.images.generate(prompt=PROMPT, quality=openai_quality, extra_body={"seed": 2})
        named_response = scenes_client.images.generate(prompt=PROMPT, quality=quality, extra_body={"seed": 2})
        assert openai_response.quality == named_response.quality == openai_quality
        assert named_response.data[0].b64_json == response.data[0].b64_json
        expected = np.asarray(scenes_pipe(PROMPT, seed=2, quality=quality).images[0])
        for each in (response, openai_response):
            np.testing.assert_array_equal(decode_pixels(decode_file(each.data[0])), expected)
        assert response.model_extra["lantern"]["method"].partition(":")[0] == preset.method.method


def test_four_images_of_one_request_have_consecutive_seeds(tiny_client: openai.OpenAI, tiny_pipe: Pipeline) -> None:
    options = {"seed": 7, "negative_prompt": "green sphere"}
    response = tiny_client.images.generate(prompt="red cube", n=4, model="tiny", extra_body=options)
    expected = tiny_pipe("red cube", num_images=4, **options).images
    pixels = [decode_pixels(decode_file(image)).tobytes() for image in response.data]
    assert pixels == [np.asarray(image).tobytes() for image in expected]
    assert response.model_extra["lantern"]["seeds"] == [7, 8, 9, 10]
    assert response.model_extra["lantern"]["tokens_per_forward_pass"] >= 1


def test_two_requests_without_a_seed_get_different_seeds_and_images(tiny_client: openai.OpenAI) -> None:
    responses = [tiny_client.images.generate(prompt="red cube") for _ in range(2)]
    seeds = [response.model_extra["lantern"]["seeds"] for response in responses]
    assert seeds[0] != seeds[1]
    assert decode_file(responses[0].data[0]) != decode_file(responses[1].data[0])


def test_a_stream_sends_partial_images_before_the_complete_image(
    scenes_client: openai.OpenAI, scenes_pipe: Pipeline
) -> None:
    options = {"seed": 3, "method": "ar"}
    with scenes_client.images.generate(prompt=PROMPT, stream=True, partial_images=3, extra_body=options) as stream:
        events = list(stream)
    *partial, last_event = events
    assert [event.type for event in partial] == ["image_generation.partial_image"] * 3
    assert [event.partial_image_index for event in partial] == [0, 1, 2]
    assert last_event.type == "image_generation.completed"
    assert last_event.usage.output_tokens == 256
    final_pixels = decode_pixels(decode_file(last_event))
    assert final_pixels.tobytes() == np.asarray(scenes_pipe(PROMPT, **options).images[0]).tobytes()
    known_rows = []
    for event in partial:
        partial_pixels = decode_pixels(decode_file(event))
        known_rows.append(sum(bool((row != GREY).any()) for row in np.split(partial_pixels, 16)))  # rows of the grid
    assert known_rows == sorted(known_rows)
    assert 2 <= known_rows[0] < known_rows[2] < 16, "partial images grow from the top"


def test_images_can_be_files_of_every_format_or_data_urls(tiny_client: openai.OpenAI) -> None:
    Image.init()
    for name, output_format in IMAGE_FORMATS.items():
        if name.upper() not in Image.SAVE:  # before 11.3 Pillow has no AVIF
            continue
        options: Any = {"output_format": name} | ({"output_compression": 80} if output_format.lossy else {})
        response = tiny_client.images.generate(prompt="red cube", **options)
        with Image.open(io.BytesIO(decode_file(response.data[0]))) as image:
            assert (image.format, response.output_format) == (name.upper(), name)
    response = tiny_client.images.generate(prompt="red cube", response_format="url", extra_body={"seed": 1})
    url = response.data[0].url
    assert url is not None
    assert url.startswith("data:image/png;base64,iVBOR")


def test_a_format_without_its_codec_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    Image.init()
    monkeypatch.delitem(Image.SAVE, "AVIF", raising=False)
    with pytest.raises(RequestError) as error:
        ImagesRequest(output_format="avif").check_fields()
    answer = HttpError.from_exception(error.value)
    assert (answer.status, answer.param, "installed without AVIF" in str(answer)) == (400, "output_format", True)


def test_invalid_requests_raise_the_exceptions_of_the_openai_client(tiny_client: openai.OpenAI) -> None:
    generate = tiny_client.images.generate
    invalid_requests: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "a magic cube"}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "red cube", "size": "1024x1024"}, "size"),
        ({"prompt": "red cube", "n": 11}, "n"),
        ({"prompt": "red cube", "quality": "low"}, "quality"),
        ({"prompt": "red cube", "quality": "best"}, "quality"),
        ({"prompt": "red cube", "quality": "high", "extra_body": {"method": "ar"}}, "quality"),
        ({"prompt": "red cube", "quality": "high", "extra_body": {"quality_budget": "strict"}}, "quality"),
        ({"prompt": "red cube", "background": "transparent"}, "background"),
        ({"prompt": "red cube", "style": "natural"}, "style"),
        ({"prompt": "red cube", "extra_body": {"strength": 3}}, "strength"),
        ({"prompt": "red cube", "extra_body": {"guidance_scale": 3}}, "guidance_scale"),
        ({"prompt": "red cube", "extra_body": {"method": "magic"}}, "method"),
        ({"prompt": "red cube", "extra_body": {"method": "sjd:window=x"}}, "method"),
        ({"prompt": "red cube", "extra_body": {"method": "ar:window=3"}}, "method"),
        ({"prompt": "red cube", "extra_body": {"method": "eagle:tree=/tmp/tree.json"}}, "method"),  # the server's file
        ({"prompt": "red cube", "extra_body": {"quality_budget": "best"}}, "quality_budget"),
        ({"prompt": "red cube", "extra_body": {"quality_budget": "strict", "method": "ar"}}, "quality_budget"),
        ({"prompt": "red cube", "extra_body": {"temperature": -1}}, "temperature"),
        ({"prompt": "red cube", "extra_body": {"seed": 1.5}}, "seed"),
        ({"prompt": "red cube", "extra_body": {"seed": 2**70}}, "seed"),
        ({"prompt": "red cube", "extra_body": {"quality_budget": "TVD=0.1"}}, "quality_budget"),
        ({"prompt": "red cube", "extra_body": {"quality_budget": "fast"}}, "quality_budget"),
        ({"prompt": "red cube", "extra_body": {"class_id": 3}}, "prompt"),
        ({"prompt": "red cube", "extra_body": {"deadline": 1e9}}, "deadline"),
        ({"prompt": "red cube", "n": 2, "stream": True}, "n"),
        ({"prompt": "red cube", "partial_images": 2}, "partial_images"),
        ({"prompt": "red cube", "output_compression": 50}, "output_compression"),
    ]
    for fields, parameter in invalid_requests:
        with pytest.raises(openai.BadRequestError) as caught:
            generate(**fields)
        assert caught.value.param == parameter, fields
        assert caught.value.type == "invalid_request_error"
        assert ("guidance_scale" not in parameter) or "use cfg_scale" in str(caught.value)
    with pytest.raises(openai.NotFoundError) as not_found:
        generate(prompt="red cube", model="gpt-image-1")
    assert not_found.value.code == "model_not_found"
    assert "`serve --alias` adds names" in str(not_found.value)


def test_models_can_be_listed_and_retrieved(tiny_client: openai.OpenAI) -> None:
    (model,) = tiny_client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert tiny_client.models.retrieve("tiny").model_extra["lantern"]["size"] == "24x24"
    with pytest.raises(openai.NotFoundError):
        tiny_client.models.retrieve("other")


@pytest.fixture(scope="module")
def limited_server(start_server: Callable[..., RunningServer], tiny_folder: Path) -> RunningServer:
    """Start a server with low limits: one image per batch, one waiting image, one method, two images per request."""
    limits = ["--alias", "gpt-image-1=tiny", "--methods", "ar", "--max-n", 2]
    return start_server(tiny_folder, "--threads", 1, "--batch", 1, "--waiting", 1, *limits)


def test_the_client_retries_when_the_server_is_busy(limited_server: RunningServer) -> None:
    async def send_requests() -> tuple[list[Any], list[Any]]:
        """Return the results of twelve requests without retries, and of four requests with retries."""
        options: dict[str, Any] = {"base_url": f"{limited_server.url}/v1", "api_key": "any"}
        async with openai.AsyncOpenAI(max_retries=0, **options) as client:
            requests = (client.images.generate(prompt="red cube") for _ in range(12))
            results = await asyncio.gather(*requests, return_exceptions=True)
        async with openai.AsyncOpenAI(max_retries=20, **options) as client:
            return results, list(await asyncio.gather(*(client.images.generate(prompt="red cube") for _ in range(4))))

    results, responses = asyncio.run(send_requests())
    errors = [result for result in results if isinstance(result, Exception)]
    assert errors
    assert {type(error) for error in errors} == {openai.RateLimitError}
    assert int(errors[0].response.headers["retry-after"]) >= 1
    assert len(responses) == 4


def test_api_keys_are_required_logged_by_name_and_reloaded_on_sighup(
    start_server: Callable[..., RunningServer], tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("# of the test\nfirst-key\n\nanna second-key\n")
    server = start_server(tiny_folder, "--threads", 1, "--api-key-file", file)
    with make_client(server) as keyless_client:
        with pytest.raises(openai.AuthenticationError) as caught:
            keyless_client.images.generate(prompt="red cube")
        assert caught.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            keyless_client.models.list()

    def request_status(key: str) -> int:
        return server.post({"prompt": "red cube"}, authorization=f"Bearer {key}")[0]

    assert (request_status("first-key"), request_status("second-key")) == (200, 200)
    wait_until(lambda: len(server.read_request_log()) >= 4)  # two rejected and two accepted requests
    assert [line["key"][:4] for line in server.read_request_log()[-2:]] == ["key ", "anna"]
    assert server.read_request_log()[-1]["client"] == "127.0.0.1"
    for content, statuses in (("third-key\n", (401, 401, 200)), ("", (401, 401, 200))):
        file.write_text(content)
        size = len(server.log)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda size=size: "keys" in server.log[size:])  # type: ignore[misc]
        assert tuple(map(request_status, ("first-key", "second-key", "third-key"))) == statuses
    assert not any(key in server.log for key in ("first-key", "second-key", "third-key"))
    assert server.stop() == 0


def test_options_alias_methods_and_max_n_apply_to_requests(limited_server: RunningServer) -> None:
    with make_client(limited_server, max_retries=0) as limited_client:
        assert limited_client.images.generate(prompt="red cube", model="gpt-image-1", n=2, quality="standard").data
        assert [model.id for model in limited_client.models.list().data] == ["tiny", "gpt-image-1"]
        assert limited_client.models.retrieve("gpt-image-1").model_extra["lantern"]["methods"] == ["ar"]
        for fields, parameter in (({"n": 3}, "n"), ({"extra_body": {"method": "sjd:window=3"}}, "method")):
            with pytest.raises(openai.BadRequestError) as caught:
                limited_client.images.generate(prompt="red cube", **fields)
            assert caught.value.param == parameter


# ---------------------------------------------------------------- edits and variations

CONE_PROMPT = "a large yellow cone left of a small blue cube on grass"
IMAGE_SIZE = 256  # width and height in pixels
CELL_SIZE = 16  # width and height of a grid cell in pixels
MASK = np.zeros((IMAGE_SIZE, IMAGE_SIZE), bool)
MASK[64:128, 16:96] = True


def encode_array_as_png(array: Any) -> bytes:
    return PNG.encode_image(Image.fromarray(array))


BLACK = np.zeros((IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
TRANSPARENT = encode_array_as_png(np.dstack([BLACK, np.where(MASK, 0, 255).astype(np.uint8)]))


@pytest.fixture(scope="module")
def original_image(scenes_pipe: Pipeline) -> Image.Image:
    grass = Image.linear_gradient("L").convert("RGB")
    return scenes_pipe.edit(grass, None, "a red cube on grass", keep_rows=14, seed=3).images[0]


def test_an_edited_image_is_the_same_png_file_as_from_the_pipeline(
    scenes_client: openai.OpenAI, scenes_pipe: Pipeline, original_image: Image.Image
) -> None:
    image = PNG.encode_image(original_image)
    options: dict[str, Any] = {"seed": 1, "method": "ar"}
    response = scenes_client.images.edit(
        image=("a.png", image), mask=("b.png", TRANSPARENT), prompt=CONE_PROMPT, size="256x256", extra_body=options
    )
    expected = scenes_pipe.edit(original_image, MASK, CONE_PROMPT, **options)
    assert decode_file(response.data[0]) == PNG.encode_image(expected.images[0])
    num_regenerated = int(MASK[::CELL_SIZE, ::CELL_SIZE].sum())
    assert response.usage.output_tokens == num_regenerated
    assert response.usage.input_tokens_details.image_tokens == 256 - num_regenerated
    pixels = decode_pixels(decode_file(response.data[0]))
    np.testing.assert_array_equal(pixels[:, 160:], np.asarray(original_image)[:, 160:])


def test_partial_images_of_an_edit_are_grey_only_in_the_masked_region(
    scenes_client: openai.OpenAI, original_image: Image.Image
) -> None:
    image = PNG.encode_image(attach_recipe(original_image, {}))
    fields: dict[str, Any] = {"image": image, "mask": TRANSPARENT, "prompt": CONE_PROMPT}
    options = {"seed": 1, "method": "ar", "steps": True}
    *events, last_event = scenes_client.images.edit(**fields, stream=True, partial_images=3, extra_body=options)
    partial_events = [event for event in events if event.type == "image_edit.partial_image"]
    kinds = "".join(event.kinds for event in events if event.type == "lantern.step")
    assert (last_event.type, len(partial_events)) == ("image_edit.completed", 3)
    grey_masks = [  # pixels that are grey only in the partial image
        (decode_pixels(decode_file(event)) == GREY).all(2) & (np.asarray(original_image) != GREY).any(2)
        for event in partial_events
    ]
    assert all((grey_mask <= MASK).all() for grey_mask in grey_masks)
    assert MASK.sum() > grey_masks[1].sum() > grey_masks[2].sum() > 0
    np.testing.assert_array_equal(np.array([*kinds]) == "k", ~MASK[::CELL_SIZE, ::CELL_SIZE].ravel())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the client deprecates variations
def test_a_variation_preserves_the_upper_rows_and_reads_the_prompt_from_the_png(
    scenes_client: openai.OpenAI, original_image: Image.Image
) -> None:
    image = PNG.encode_image(original_image)
    half_preserved = scenes_client.images.create_variation(image=image, extra_body={"method": "sjd:window=7"})
    original_pixels = np.asarray(original_image)
    pixels = decode_pixels(decode_file(half_preserved.data[0]))
    np.testing.assert_array_equal(pixels[:112], original_pixels[:112])
    assert (pixels[128:144] != original_pixels[128:144]).any()
    options = {"keep_rows": 15, "prompt": CONE_PROMPT}
    mostly_preserved = scenes_client.images.create_variation(image=image, n=2, extra_body=options)
    first_pixels, second_pixels = (decode_pixels(decode_file(image_data)) for image_data in mostly_preserved.data)
    np.testing.assert_array_equal(first_pixels[:224], np.asarray(original_image)[:224])
    assert (first_pixels[240:] != second_pixels[240:]).any()


def test_an_invalid_edit_request_is_rejected_with_the_name_of_the_field(
    scenes_client: openai.OpenAI, original_image: Image.Image
) -> None:
    image = PNG.encode_image(attach_recipe(original_image, {}))
    invalid_requests: list[tuple[dict[str, Any], str]] = [
        ({"mask": encode_array_as_png(np.zeros((64, 64), np.uint8))}, "mask"),
        ({"mask": encode_array_as_png(np.zeros((IMAGE_SIZE, IMAGE_SIZE), np.uint8))}, "mask"),
        ({"mask": b"no picture"}, "mask"),
        ({}, "mask"),
        ({"image": image[:5000], "mask": TRANSPARENT}, "image"),
        ({"image": b"", "mask": TRANSPARENT}, "image"),
        ({"image": [image, image], "mask": TRANSPARENT}, "image"),
        ({"mask": TRANSPARENT, "size": "64x64"}, "size"),
        ({"mask": TRANSPARENT, "input_fidelity": "medium"}, "input_fidelity"),
        ({"mask": TRANSPARENT, "extra_body": {"keep_rows": 3}}, "mask"),
        ({"mask": TRANSPARENT, "extra_body": {"strength": 1}}, "strength"),
        ({"mask": TRANSPARENT, "prompt": "a magic cube"}, "prompt"),
    ]
    for options, parameter in invalid_requests:
        with pytest.raises(openai.BadRequestError) as caught:
            scenes_client.images.edit(**{"image": image, "prompt": CONE_PROMPT} | options)
        assert caught.value.param == parameter, options
        assert caught.value.code == "invalid_value"
    with pytest.raises(openai.APIStatusError) as too_large:
        scenes_client.images.edit(image=image + bytes(9 << 20), mask=TRANSPARENT, prompt=CONE_PROMPT)
    assert too_large.value.status_code == 413


def test_an_edit_request_that_is_not_a_valid_form_is_rejected(scenes_server: RunningServer) -> None:
    for content_type, body, status in (
        ("application/json", b"{}", 415),
        ("multipart/form-data", b"--x\r\n", 400),
        ("multipart/form-data; boundary=x", b'--x\r\ncontent-disposition: form-data; name="image"\r\n\r\nhalf', 400),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\n--x--", 400),
    ):
        assert scenes_server.request("POST", EDITS, body, {"content-type": content_type})[0] == status, body
