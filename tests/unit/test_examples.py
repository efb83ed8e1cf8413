"""The examples and the notebook run, and the reference of the Python API is complete."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lantern_rt import Pipeline

ROOT = Path(__file__).parents[2]


def test_the_api_reference_describes_every_public_name(tmp_path: Path) -> None:
    import lantern_rt

    page = tmp_path / "reference.md"
    subprocess.run([sys.executable, str(ROOT / "docs/reference.py"), str(page)], check=True)
    text = page.read_text("utf-8").replace("\\", "")
    assert [name for name in lantern_rt.__all__ if f"\n## {name}\n" not in text] == []
    assert "\n### StreamStep.image\n" in text


def test_the_example_first_program_generates_two_images(tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "examples/first_program.py")]
    process = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert process.stdout.count("\n") == 1
    assert "tokens per forward pass" in process.stdout
    assert process.stderr == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sphere-1.png", "sphere-2.png"]


def test_the_example_notebook_is_valid_and_runs_without_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples/tour.ipynb").read_text("utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        assert {"cell_type", "id", "metadata", "source"} <= cell.keys()
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    manifest = names["pipe"].bundle.manifest
    assert names["result"].images[0].size == (manifest.image_width, manifest.image_height)


def test_the_docs_script_selects_each_images_longest_caption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/reproduce.md").read_text("utf-8"), re.M | re.S)
    captions = [(1, "a cat"), (2, "a dog"), (1, "a cat\nwith a hat "), (2, "dog")]
    entries = [{"image_id": image, "caption": caption} for image, caption in captions]
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/captions_val2017.json").write_text(json.dumps({"annotations": entries}))
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert Path("captions.txt").read_text().splitlines() == ["a cat with a hat", "a dog"]


def test_the_comfyui_node_generates_the_pipelines_images() -> None:
    pytest.importorskip("torch")
    nodes = runpy.run_path(str(ROOT / "examples/comfyui_node.py"))["NODE_CLASS_MAPPINGS"]
    node = nodes["LanternDraw"]()
    values = ("scenes", "a red cube on sand", "", 3, 2, "fast")
    inputs = dict(zip(node.INPUT_TYPES()["required"], values, strict=True))
    (images,) = getattr(node, node.FUNCTION)(**inputs)
    expected = Pipeline.from_bundle("scenes")("a red cube on sand", seed=3, num_images=2, quality="fast").images
    assert (images.numpy() * 255).round().astype(np.uint8).tobytes() == b"".join(image.tobytes() for image in expected)


@pytest.mark.filterwarnings("ignore")  # warnings inside gradio
def test_the_gradio_page_generates_the_pipelines_image(pipe: Pipeline) -> None:
    pytest.importorskip("gradio")
    from gradio_client import Client

    app = runpy.run_path(str(ROOT / "examples/gradio_app.py"), run_name="app")["make_app"](pipe)
    _, url, _ = app.launch(prevent_thread_lock=True, quiet=True)
    try:
        client = Client(url, verbose=False)
        path, figures = client.predict("red cube", "", 4, "strict", api_name="/generate")
        with pytest.raises(Exception, match="unknown word 'purple'"):
            client.predict("purple cube", "", 4, "strict", api_name="/generate")
    finally:
        app.close()
    assert "tokens per forward pass" in figures
    with Image.open(path) as image:
        expected = pipe("red cube", seed=4).images[0]
        assert image.convert("RGB").tobytes() == expected.tobytes()


# ---------------------------------------------------------------- the service


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples/service.py"), run_name="service")


@pytest.fixture(scope="module")
def address(service: dict[str, Any], pipe: Pipeline) -> Iterator[str]:
    server = service["make_server"](pipe, port=0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()
    thread.join()


def fetch_response(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_the_service_answers_simultaneous_requests_rightly(address: str, pipe: Pipeline) -> None:
    with ThreadPoolExecutor(4) as pool:
        responses = list(pool.map(lambda seed: fetch_response(f"{address}?prompt=red+cube&seed={seed}"), range(4)))
    for seed, (status, body) in enumerate(responses):
        assert status == 200
        with Image.open(BytesIO(body)) as image:
            assert image.tobytes() == pipe("red cube", seed=seed).images[0].tobytes()
            assert image.info["seed"] == str(seed)


@pytest.mark.parametrize(
    ("query", "message"),
    [("?prompt=blu", "found unknown word 'blu'"), ("", "found empty text"), ("?prompt=red&seed=x", "found 'x'")],
)
def test_the_service_rejects_an_invalid_request(address: str, query: str, message: str) -> None:
    status, body = fetch_response(f"{address}{query}")
    assert status == 400
    assert message in body.decode()
    assert body.count(b"\n") == 1


def test_the_service_stops_at_the_time_limit(service: dict[str, Any], pipe: Pipeline) -> None:
    generator = service["ImageGenerator"](pipe)
    with pytest.raises(TimeoutError):
        generator.generate_png("red cube", 1, max_seconds=0.0)
    assert generator.generate_png("red cube", 1).startswith(b"\x89PNG")
