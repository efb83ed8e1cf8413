"""Test that sending an image parameter of OpenAI's client at its documented default or as null changes nothing."""

from __future__ import annotations

import io
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin, get_type_hints

import openai
import pytest
from openai.types.image_create_variation_params import ImageCreateVariationParams
from openai.types.image_edit_params import ImageEditParamsNonStreaming
from openai.types.image_generate_params import ImageGenerateParamsNonStreaming
from PIL import Image
from running_server import RunningServer

ENDPOINTS: dict[str, Any] = {
    "generate": ImageGenerateParamsNonStreaming,
    "edit": ImageEditParamsNonStreaming,
    "create_variation": ImageCreateVariationParams,
}
DEFAULTS: dict[str, Any] = {
    "background": "auto",
    "frame_count": 9,
    "frame_duration_ms": 200,
    "input_fidelity": "low",
    "moderation": "auto",
    "n": 1,
    "output_compression": 100,
    "output_format": "png",
    "partial_images": 0,
    "quality": "auto",
    "response_format": "b64_json",
    "safety_identifier": "",
    "size": "auto",
    "stream": False,
    "style": "vivid",
    "user": "",
}


def list_cases(parameters: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a `TypedDict`'s optional parameters: null if the type allows it, and the default."""
    for name, hint in get_type_hints(parameters).items():
        if name in parameters.__required_keys__:
            continue
        if get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint):
            yield name, None
        if name in DEFAULTS:
            yield name, DEFAULTS[name]


CASES = [(method, *case) for method, parameters in ENDPOINTS.items() for case in list_cases(parameters)]


@pytest.fixture(scope="module")
def client(tiny_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="any", max_retries=0) as opened_client:
        yield opened_client


def request_image(client: openai.OpenAI, method: str, **fields: Any) -> Any:
    """Return the image data, or the field and message of the error: edits fail, but after the checks of fields."""
    file = io.BytesIO()
    Image.new("RGB", (24, 24)).save(file, "PNG")
    image = {} if method == "generate" else {"image": ("a.png", file.getvalue())}
    extra_fields = {"prompt": "red cube", "seed": 1, "method": "ar"}
    prompt = {} if method == "create_variation" else {"prompt": "red cube"}
    try:
        response = getattr(client.images, method)(**prompt, **image, **fields, extra_body=extra_fields)
    except openai.BadRequestError as error:
        return error.param, error.message
    return response.data


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the client deprecates variations
@pytest.mark.parametrize(("method", "name", "value"), CASES)
def test_a_parameter_at_its_default_or_null_gives_the_same_response_as_an_omitted_parameter(
    client: openai.OpenAI, method: str, name: str, value: Any
) -> None:
    expected = request_image(client, method)
    assert request_image(client, method, **{name: value}) == expected
    assert method == "generate" or expected[0] == "image"
