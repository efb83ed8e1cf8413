"""Check that unusual but valid requests, as clients and proxies send them, are answered like plain ones."""

from __future__ import annotations

import io
import json
from urllib.parse import urlsplit

import openai
import pytest
from PIL import Image
from running_server import GENERATIONS, RunningServer

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("path", ["/", "/docs", "/livez", "/readyz", "/v1/models", "/v1/models/tiny", "/page/page.js"])
def test_head_has_the_headers_of_get_and_no_body(tiny: RunningServer, path: str) -> None:
    responses = [tiny.request(method, path) for method in ("HEAD", "GET")]
    (status, head, body), (expected, headers, content) = responses
    assert (status, expected, body) == (200, 200, b"")
    assert head["content-type"] == headers["content-type"]
    assert int(head["content-length"]) == len(content)


@pytest.mark.parametrize(("method", "path", "status"), [("HEAD", GENERATIONS, 405), ("HEAD", "/nothing", 404)])
def test_head_is_rejected_as_get_is(tiny: RunningServer, method: str, path: str, status: int) -> None:
    assert tiny.request(method, path)[0] == tiny.request("GET", path)[0] == status


def test_a_slash_at_the_end_leads_to_the_path_without_it(tiny: RunningServer) -> None:
    body = json.dumps({"prompt": "red cube"}).encode()
    for method, path in (("POST", GENERATIONS), ("GET", "/livez"), ("GET", "/docs")):
        status, headers, _ = tiny.request(method, f"{path}/", body if method == "POST" else None, JSON)
        assert (status, urlsplit(headers["location"]).path) == (307, path), "with its method and body"
    with openai.OpenAI(base_url=f"{tiny.url}/v1/", api_key="any") as client:
        assert client.images.generate(prompt="red cube").data
        assert [model.id for model in client.models.list().data] == ["tiny"]


@pytest.mark.parametrize("name", ["image", "image[]"])
def test_an_image_in_a_list_of_one_is_that_image(tiny: RunningServer, name: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (24, 24)).save(file, "PNG")
    parts = [(f'name="{name}"; filename="a.png"', file.getvalue()), ('name="prompt"', b"red cube")]
    body = b"".join(
        b"--B\r\ncontent-disposition: form-data; %b\r\n\r\n%b\r\n" % (head.encode(), content) for head, content in parts
    )
    headers = {"content-type": "multipart/form-data; boundary=B"}
    status, _, response = tiny.request("POST", "/v1/images/edits", body + b"--B--\r\n", headers)
    error = json.loads(response)["error"]
    assert (status, error["param"]) == (400, "image"), "read, but this bundle has no image encoder"
    assert "no image encoder" in error["message"]


@pytest.mark.parametrize(
    "prompt",
    [
        " red cube ",
        "RED  CUBE!",
        "red\tcube\n",
        "red\u00a0cube",
        "red\u200bcube",
        "\u202ered cube",
        "red \0 cube",
        "red cube \U0001f600",
    ],
)
def test_text_around_words_does_not_change_the_image(tiny: RunningServer, prompt: str) -> None:
    options = {"seed": 1, "method": "ar", "output_format": "jpeg"}  # JPEG files record no prompt
    status, response = tiny.post({"prompt": prompt, **options})
    assert status == 200
    assert response["data"] == tiny.post({"prompt": "red cube", **options})[1]["data"]


@pytest.mark.parametrize("prompt", ["r\u00e9d", "\uff52\uff45\uff44 cube", "<script>red</script>", "", "\0"])
def test_text_of_other_words_is_rejected_in_one_printable_line(tiny: RunningServer, prompt: str) -> None:
    status, response = tiny.post({"prompt": prompt})
    assert (status, response["error"]["param"]) == (400, "prompt")
    assert response["error"]["message"].isprintable()


def test_text_that_is_not_used_may_be_anything(tiny: RunningServer) -> None:
    for text in ("", "\0", "x" * 5000, "\U0001f600"):
        assert tiny.post({"prompt": "red cube", "user": text})[0] == 200
