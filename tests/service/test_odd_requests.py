"""Test unusual but valid requests: HEAD, trailing slashes, list-like form fields, and unusual characters in text."""

from __future__ import annotations

import json
from urllib.parse import urlsplit

import openai
import pytest
from PIL import Image
from running_server import EDITS, FORM, GENERATIONS, JSON, RunningServer, format_form

from lantern_rt.output.formats import PNG


@pytest.mark.parametrize(
    "path",
    ["/", "/docs", "/livez", "/readyz", "/healthz", "/version", "/v1/models", "/v1/models/tiny", "/page/page.js"],
)
def test_a_head_response_has_the_headers_of_get_and_no_body(tiny_server: RunningServer, path: str) -> None:
    responses = [tiny_server.request(method, path) for method in ("HEAD", "GET")]
    (head_status, head_headers, head_body), (get_status, get_headers, get_body) = responses
    assert (head_status, get_status, head_body) == (200, 200, b"")
    assert head_headers["content-type"] == get_headers["content-type"]
    assert int(head_headers["content-length"]) == len(get_body)


@pytest.mark.parametrize(("method", "path", "status"), [("HEAD", GENERATIONS, 405), ("HEAD", "/nothing", 404)])
def test_head_and_get_requests_are_rejected_with_the_same_status(
    tiny_server: RunningServer, method: str, path: str, status: int
) -> None:
    assert tiny_server.request(method, path)[0] == tiny_server.request("GET", path)[0] == status


def test_a_path_with_a_trailing_slash_redirects_to_the_path_without_the_slash(tiny_server: RunningServer) -> None:
    body = json.dumps({"prompt": "red cube"}).encode()
    for method, path in (("POST", GENERATIONS), ("GET", "/livez"), ("GET", "/docs")):
        status, headers, _ = tiny_server.request(method, f"{path}/", body if method == "POST" else None, JSON)
        assert (status, urlsplit(headers["location"]).path) == (307, path)  # 307 keeps the method and the body
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1/", api_key="any") as client:
        assert client.images.generate(prompt="red cube").data
        assert [model.id for model in client.models.list().data] == ["tiny"]


@pytest.mark.parametrize("name", ["image", "image[]"])
def test_the_source_image_is_read_from_image_or_image_with_brackets(tiny_server: RunningServer, name: str) -> None:
    body = format_form({name: PNG.encode_image(Image.new("RGB", (24, 24))), "prompt": b"red cube"})
    status, _, response = tiny_server.request("POST", EDITS, body, {"content-type": FORM})
    error = json.loads(response)["error"]
    # The form was parsed: the error is the missing image encoder of this bundle.
    assert (status, error["param"]) == (400, "image")
    assert "no image encoder" in error["message"]


RED_CUBES = [
    " red cube ",
    "RED  CUBE!",
    "red\tcube\n",
    "red\u00a0cube",
    "red\u200bcube",
    "\u202ered cube",
    "red \0 cube",
]


@pytest.mark.parametrize("prompt", [*RED_CUBES, "red cube \U0001f600"])
def test_case_spaces_and_symbols_in_a_prompt_do_not_change_the_image(tiny_server: RunningServer, prompt: str) -> None:
    options = {"seed": 1, "method": "ar", "output_format": "jpeg"}  # JPEG files record no prompt
    status, response = tiny_server.post({"prompt": prompt, **options})
    assert status == 200
    assert response["data"] == tiny_server.post({"prompt": "red cube", **options})[1]["data"]


@pytest.mark.parametrize("prompt", ["r\u00e9d", "\uff52\uff45\uff44 cube", "<script>red</script>", "", "\0"])
def test_a_prompt_with_unknown_words_or_no_words_is_rejected_with_a_printable_message(
    tiny_server: RunningServer, prompt: str
) -> None:
    status, response = tiny_server.post({"prompt": prompt})
    assert (status, response["error"]["param"]) == (400, "prompt")
    assert response["error"]["message"].isprintable()


def test_the_unused_field_user_may_contain_any_text(tiny_server: RunningServer) -> None:
    for text in ("", "\0", "x" * 5000, "\U0001f600"):
        assert tiny_server.post({"prompt": "red cube", "user": text})[0] == 200
