"""Test docs/clients.md: its values are consistent, and the server accepts the requests of each listed client.

Each request body has the fields that the public source code of a client sends, with the values of the page.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image
from running_server import EDITS, FORM, RunningServer, format_form

yaml = pytest.importorskip("yaml")

PAGE = (Path(__file__).parents[2] / "docs/clients.md").read_text("utf-8")
KEY = re.findall(r"export LANTERN_RT_API_KEY=(\S+)", PAGE)[0]
COMMAND = re.findall(r"^    lantern-rt serve (.*)", PAGE, re.MULTILINE)[0]
PROMPT = "a red cube on sand"
MAPPED_SIZES = [size.partition("=")[0] for size in re.findall(r"--map-size (\S+)", COMMAND)]
NODE = os.environ.get("LANTERN_NODE_PROJECT", "")  # a folder whose node_modules has `openai`


def read_table(text: str) -> dict[str, str]:
    """Return the first value in backquotes of each table row, by the name of the row."""
    rows = re.findall(r"^`?([^|`\n]+?)`? \| [^`\n]*`([^`]*)`", text, re.MULTILINE)
    return dict(rows)


COMMON_VALUES = read_table(PAGE.partition("Where to enter")[0])
URL = COMMON_VALUES["Base URL"]
MODEL = COMMON_VALUES["Model"]
SIZE = COMMON_VALUES["Size"]
# Names of the settings for base URL, key, model and size, by client.
SETTINGS = {
    client: [re.findall(r"`([^`]*)`", cell) for cell in cells.split(" | ")]
    for client, cells in re.findall(r"^([A-Z].*?|n8n.*?) \| (.* \| .* \| .*)$", PAGE, re.MULTILINE)
}
CONFIGURATION = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])
HOME: dict[str, Any] = CONFIGURATION["rest_command"]["generate_image"]
(FIXED,) = SETTINGS["LibreChat"][2]
WEBUI_BODY = {"model": MODEL, "prompt": PROMPT, "n": 2, "response_format": "b64_json"}
LIBRECHAT = {"model": FIXED, "prompt": PROMPT, "n": 1, "background": "auto", "output_format": "png", "quality": "auto"}
COMFY_BODY = {"prompt": PROMPT, "n": 1, "response_format": "b64_json", "model": MODEL}
N8N_BODY = {"prompt": PROMPT, "model": FIXED, "size": "1024x1024"}
NODE_PROGRAM = f"""
import {{ createReadStream }} from "node:fs";
import {{ writeFile }} from "node:fs/promises";
import OpenAI from "openai";

const client = new OpenAI();
const body = {{ model: "{MODEL}", prompt: "a red cube on sand", size: "{SIZE}" }};
const answer = await client.images.generate(body);
await writeFile("cube.png", Buffer.from(answer.data[0].b64_json, "base64"));
"""
NODE_CHECKS = """
const prompt = "a red cube on sand";
const edited = await client.images.edit({ image: createReadStream("a.png"), prompt });
const varied = await client.images.createVariation({ image: createReadStream("cube.png"), n: 2 });
const stream = await client.images.generate({ prompt, stream: true, partial_images: 1, seed: 1 });
const kinds = [];
for await (const event of stream) kinds.push(event.type);
const models = [];
for await (const model of client.models.list()) models.push(model.id);
const counts = [edited.data.length, varied.data.length, kinds.length, models.length];
if (String(counts) !== "1,2,2,2") throw new Error(String([...counts, ...kinds]));
"""
# Request bodies by client. Comments name the source file that builds the body.
BODIES: dict[str, dict[str, Any]] = {
    # open-webui/open-webui: backend/open_webui/routers/images.py
    "Open WebUI": {**WEBUI_BODY, "size": SIZE},
    "Open WebUI with its default size": {**WEBUI_BODY, "n": 1, "size": "512x512"},
    "Open WebUI with the other name": {"model": FIXED, "prompt": PROMPT, "n": 1, "size": "auto"},
    # danny-avila/LibreChat: api/app/clients/tools/structured/OpenAIImageTools.js
    "LibreChat": {**LIBRECHAT, "size": "auto"},
    "LibreChat with a size": {**LIBRECHAT, "quality": "high", "size": "1024x1024"},
    "LibreChat with WebP": {**LIBRECHAT, "output_format": "webp", "output_compression": 100, "size": "auto"},
    # bowtiedbluefin/ComfyUI-AI-CustomURL: nodes/image_nodes.py, utils/api_client.py
    "ComfyUI": {**COMFY_BODY, "size": SIZE},
    "ComfyUI with its default size": {**COMFY_BODY, "size": "1024x1024", "quality": "hd", "seed": 7},
    # n8n-io/n8n: packages/@n8n/nodes-langchain/nodes/vendors/OpenAi/v2/actions/image/generate.operation.ts
    "n8n's node OpenAI": {**N8N_BODY, "quality": "medium"},
    "n8n's node OpenAI with options": {
        **N8N_BODY,
        "quality": "standard",
        "response_format": "b64_json",
        "style": "vivid",
    },
    # home-assistant/core: homeassistant/components/rest_command/__init__.py
    "Home Assistant": json.loads(HOME["payload"].replace("{{ prompt }}", PROMPT)),
}


def encode_transparent_image() -> bytes:
    """Return a PNG file of 256 x 256 pixels, of which a square of 64 x 64 is transparent."""
    image = Image.new("RGBA", (256, 256), (200, 180, 120, 255))
    image.paste((0, 0, 0, 0), (64, 64, 128, 128))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def server(start_server: Callable[..., RunningServer]) -> Iterator[RunningServer]:
    """Start a server with the command and the key of the page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANTERN_RT_API_KEY", KEY)
        yield start_server(*shlex.split(COMMAND), "--threads", 1)


def test_the_plain_request_has_the_url_key_model_and_size_of_the_first_table() -> None:
    assert COMMON_VALUES["API key"] == KEY
    assert HOME["url"] == f"{URL}/images/generations"
    assert HOME["headers"] == {"authorization": f"Bearer {KEY}"}
    body = json.loads(HOME["payload"])
    assert (body["model"], body["size"]) == (MODEL, SIZE)


@pytest.mark.parametrize("name", BODIES)
def test_the_server_accepts_the_request_body_of_each_client(server: RunningServer, name: str) -> None:
    body = BODIES[name]
    status, response = server.post(body, authorization=f"Bearer {KEY}")
    assert (status, response.get("error")) == (200, None)
    assert response["size"] == SIZE
    assert len(response["data"]) == body.get("n", 1)
    with Image.open(io.BytesIO(base64.b64decode(response["data"][0]["b64_json"]))) as image:
        assert f"{image.width}x{image.height}" == SIZE


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"size": "1792x1024"}, "size"),
        ({"background": "transparent"}, "background"),
        ({"style": "natural"}, "style"),
        ({"guidance_scale": 5.0}, "guidance_scale"),
    ],
)
def test_unsupported_fields_are_rejected_as_documented(server: RunningServer, fields: Any, param: str) -> None:
    status, response = server.post({"prompt": PROMPT, **fields}, authorization=f"Bearer {KEY}")
    assert (status, response["error"]["param"]) == (400, param)


def test_requests_without_the_key_from_the_environment_get_status_401(server: RunningServer) -> None:
    assert server.post({"prompt": PROMPT})[0] == 401
    assert server.post({"prompt": PROMPT}, authorization="Bearer other")[0] == 401
    assert KEY not in server.log


def test_a_mapped_size_generates_the_same_image_as_the_target_size_of_the_mapping(server: RunningServer) -> None:
    responses = [
        server.post({"prompt": PROMPT, "seed": 1, "size": size}, authorization=f"Bearer {KEY}")[1]["data"]
        for size in (SIZE, *MAPPED_SIZES)
    ]
    assert len(responses) == 3
    assert responses[0] == responses[1] == responses[2]


@pytest.mark.parametrize("image_field", ["image", "image[]"])  # the name in Open WebUI; in LibreChat and n8n
@pytest.mark.parametrize("size", ["auto", "1024x1024"])
def test_an_edit_without_a_mask_is_accepted_for_an_image_with_transparent_pixels(
    server: RunningServer, image_field: str, size: str
) -> None:
    fields = {"model": FIXED, "prompt": PROMPT, "quality": "auto", "size": size}
    form = {name: value.encode() for name, value in fields.items()} | {image_field: encode_transparent_image()}
    headers = {"content-type": FORM, "authorization": f"Bearer {KEY}"}
    status, _, response = server.request("POST", EDITS, format_form(form), headers)
    assert (status, json.loads(response).get("error")) == (200, None)


def test_the_model_list_has_the_model_name_and_the_alias(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
        assert [model.id for model in client.models.list().data] == [MODEL, FIXED]


@pytest.mark.skipif(not (NODE and shutil.which("node")), reason="needs LANTERN_NODE_PROJECT with npm's `openai`")
def test_the_node_js_client_reads_the_variables_of_the_table(server: RunningServer) -> None:
    file = Path(NODE) / "clients.mjs"
    (Path(NODE) / "a.png").write_bytes(encode_transparent_image())
    file.write_text(NODE_PROGRAM + NODE_CHECKS, "utf-8")
    (url,), (key,), *_ = SETTINGS["OpenAI's, for Python or Node"]
    environment = os.environ | {url: f"{server.url}/v1", key: KEY}
    subprocess.run(["node", file.name], cwd=NODE, env=environment, check=True, timeout=120)
    with Image.open(Path(NODE) / "cube.png") as image:
        assert image.size == (256, 256)


def test_litellm_generates_and_edits_with_the_settings_of_the_table(server: RunningServer, tmp_path: Path) -> None:
    if find_spec("litellm") is None:
        pytest.skip("needs LiteLLM")
    (url,), (key,), (model, name), (size,) = SETTINGS["LiteLLM"]
    options = {url: f"{server.url}/v1", key: KEY, model: name, size: SIZE, "prompt": PROMPT, "seed": 1}
    (tmp_path / "a.png").write_bytes(encode_transparent_image())
    for call, count in (("image_generation(n=2, ", 2), ('image_edit(image=open("a.png", "rb"), ', 1)):
        program = f"import litellm\nanswer = litellm.{call}**{options})\n"
        check = f"assert [bool(image.b64_json) for image in answer.data] == [True] * {count}\n"
        environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        subprocess.run([sys.executable, "-c", program + check], cwd=tmp_path, env=environment, check=True, timeout=120)
