"""Check answers to requests that are wrong, late or abandoned, and what the server reports about itself."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import re
import tracemalloc
from collections.abc import Callable
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from running_server import EDITS, FORM, GENERATIONS, RunningServer, format_form, format_head, parse_events, wait_until

from lantern_rt import AsyncPipeline, Pipeline
from lantern_rt.runtime.batch import Batch
from lantern_rt.serve import images
from lantern_rt.serve.app import make_app
from lantern_rt.serve.backend import ADMITTED, LocalBackend
from lantern_rt.serve.images import ImagesEndpoint
from lantern_rt.serve.log import RequestRecord
from lantern_rt.serve.protocol import ImagesRequest
from lantern_rt.serve.state import ServerLimits, ServerState
from lantern_rt.text.words import ANY_WORDS

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b'{"prompt": "red cube"}', {"content-type": "text/plain"}, 415),
        (b'{"prompt": "red cube"}', {}, 415),
        (b"", JSON, 400),
        (b"{", JSON, 400),
        (b"[1]", JSON, 400),
        (b'{"prompt": NaN}', JSON, 400),
        (b"\xff\xfe", JSON, 400),
        (b"[" * 60000, JSON, 400),
        (b'{"prompt": "' + b"x" * (1 << 17) + b'"}', JSON, 413),
        (b'{"prompt": "' + b"red " * 800 + b'"}', JSON, 400),
        (b'{"prompt": "red cube", "temperature": 1e400}', JSON, 400),
        (b'{"prompt": "red cube", "cfg_tokens": [1]}', JSON, 400),
        (b'{"prompt": "red cube", "seed": -1}', JSON, 400),
        (b'{"prompt": "red \\ud800 cube"}', JSON, 400),
        (b'{"prompt": "red cube", "method": "sjd:window=1000000"}', JSON, 400),
    ],
)
def test_a_wrong_body_is_rejected_in_one_line(
    tiny: RunningServer, body: bytes, headers: dict[str, str], status: int
) -> None:
    answer_status, send_to_backend, text = tiny.request("POST", GENERATIONS, body, headers)
    assert (answer_status, send_to_backend["content-type"]) == (status, "application/json")
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]
    assert len(error["message"]) < 500
    assert "Traceback" not in tiny.log


def test_paths_and_methods_that_do_not_exist_are_told_so(tiny: RunningServer) -> None:
    for method, path, status in (
        ("GET", GENERATIONS, 405),
        ("GET", "/v1/images/edits", 405),
        ("GET", "/nothing", 404),
        ("GET", "/page/../app.py", 404),
        ("GET", "/page/..%2fapp.py", 404),
    ):
        answer_status, _, text = tiny.request(method, path)
        assert answer_status == status
        assert json.loads(text)["error"]["message"]


def test_a_request_that_takes_too_long_ends_at_its_deadline(scenes: RunningServer) -> None:
    aborted_before = scenes.metric("lantern_aborted_total", model="scenes", reason="deadline")
    body = {"prompt": "a red sphere on sand", "method": "ar", "n": 4, "deadline": 0.2}
    status, response = scenes.post(body)
    assert (status, response["error"]["code"], response["error"]["param"]) == (504, "deadline_exceeded", "deadline")
    wait_until(lambda: scenes.metric("lantern_images_running", model="scenes") == 0)
    assert scenes.metric("lantern_aborted_total", model="scenes", reason="deadline") == aborted_before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_places(scenes: RunningServer, stream: bool) -> None:
    aborted_before = scenes.metric("lantern_aborted_total", model="scenes", reason="disconnected")
    body = {"prompt": "a red sphere on sand", "method": "ar", "n": 1 if stream else 4}
    body |= {"stream": True, "steps": True} if stream else {}
    with scenes.open(body) as connection:
        wait_until(lambda: scenes.metric("lantern_images_running", model="scenes") > 0)
        if stream:
            assert connection.getresponse().read(5)
    wait_until(lambda: scenes.metric("lantern_images_running", model="scenes") == 0)
    wait_until(
        lambda: scenes.metric("lantern_aborted_total", model="scenes", reason="disconnected") == aborted_before + 1
    )
    wait_until(lambda: scenes.request_lines()[-1]["status"] == 499)


def test_steps_tell_how_every_code_came_to_be(scenes: RunningServer) -> None:
    letters: dict[str, set[str]] = {}
    for method in ("ar", "sjd:window=3", "eagle", "lantern++:lambda=8"):
        asked = {"prompt": "a red sphere on sand", "seed": 1, "method": method, "stream": True, "steps": True}
        _, _, body = scenes.request("POST", GENERATIONS, json.dumps(asked).encode(), JSON)
        *steps, (kind, last) = parse_events(body)
        assert kind == "image_generation.completed"
        assert {kind for kind, _ in steps} == {"lantern.step"}
        kinds = "".join(data["kinds"] for _, data in steps)
        assert len(kinds) == 256 == steps[-1][1]["done"]
        assert last["lantern"]["target_passes"] >= len(steps)
        letters[method] = set(kinds)
    assert letters["ar"] == {"n"}
    for method, exact in (("sjd:window=3", True), ("eagle", True), ("lantern++:lambda=8", False)):
        assert {"d", "x", "n"} <= letters[method]
        assert ("r" in letters[method]) != exact


def test_requests_are_counted_and_logged_without_their_prompts(tiny: RunningServer) -> None:
    names = ("lantern_requests_total", "lantern_tokens_total", "lantern_target_passes_total")
    labels: list[dict[str, str]] = [{"model": "tiny", "code": "200"}, {"model": "tiny"}, {"model": "tiny"}]
    counts_before = [tiny.metric(name, **sample_labels) for name, sample_labels in zip(names, labels, strict=True)]
    headers = {"x-request-id": "mine-1"}
    assert tiny.post({"prompt": "red cube", "n": 2, "method": "ar", "seed": 1}, **headers)[0] == 200
    wait_until(lambda: tiny.metric(names[0], **labels[0]) > counts_before[0])
    counts_after = [tiny.metric(name, **sample_labels) for name, sample_labels in zip(names, labels, strict=True)]
    assert [count_after - count_before for count_after, count_before in zip(counts_after, counts_before, strict=True)][
        :2
    ] == [1, 72]
    assert counts_after[2] - counts_before[2] >= 72, "ties take passes, too"
    wait_until(lambda: any(line["request_id"] == "mine-1" for line in tiny.request_lines()))
    line = next(line for line in tiny.request_lines() if line["request_id"] == "mine-1")
    assert (line["status"], line["method"], line["images"]) == (200, "ar", 2)
    assert tiny.post({"prompt": "red dragon"}, **{"x-request-id": "mine-2"})[0] == 400
    assert tiny.post(b'{"prompt": "red dragon', **{"x-request-id": "mine-3"})[0] == 400
    wait_until(lambda: any(line["request_id"] == "mine-3" for line in tiny.request_lines()))
    assert "red cube" not in tiny.log
    assert "dragon" not in tiny.log
    assert tiny.post({"prompt": "red cube"}, **{"x-request-id": "a b"})[0] == 200
    assert not any(line["request_id"] == "a b" for line in tiny.request_lines())


def test_rejected_requests_are_logged_and_counted_but_not_health_checks(tiny: RunningServer) -> None:
    requests: list[tuple[str, str, dict[str, str], int]] = [
        ("GET", "/wp-login.php", {}, 404),
        ("GET", GENERATIONS, {}, 405),
        ("GET", "/v1/models/others", {}, 404),
        ("GET", "/v1/models", {"host": "other.example"}, 403),
        ("POST", GENERATIONS, {**JSON, "origin": "https://other.example"}, 403),
        ("GET", "/livez", {}, 200),
        ("GET", "/v1/models", {}, 200),
    ]
    before = len(tiny.request_lines()), tiny.metric("lantern_requests_total", model="", code="403")
    for i, (method, path, headers, status) in enumerate(requests):
        assert tiny.request(method, path, headers={**headers, "x-request-id": f"refused-{i}"})[0] == status
    wait_until(lambda: len(tiny.request_lines()) >= before[0] + 5)
    logged_requests = [(line["request_id"], line["path"], line["status"]) for line in tiny.request_lines()[before[0] :]]
    assert logged_requests == [(f"refused-{i}", path, status) for i, (_, path, _, status) in enumerate(requests[:5])]
    assert tiny.metric("lantern_requests_total", model="", code="403") == before[1] + 2


def test_answers_carry_safe_headers_and_other_sites_may_not_read_them(tiny: RunningServer) -> None:
    request_headers = {"origin": "https://example.org", "x-request-id": "mine-4"}
    status, headers, body = tiny.request("GET", "/", headers=request_headers)
    assert headers["x-request-id"] == "mine-4"
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers
    assert b"<script>" not in body


@pytest.fixture(scope="module")
def several(
    start: Callable[..., RunningServer], tiny_folder: Path, lumina_bundle: Path, c2i_bundle: Path, simplear_bundle: Path
) -> RunningServer:
    """Start a server of models of one size, of several sizes and of classes, whose answers another site may read."""
    return start(tiny_folder, lumina_bundle, c2i_bundle, simplear_bundle, "--threads=1", "--cors=https://example.org")


def test_named_sites_may_ask(several: RunningServer) -> None:
    _, headers, _ = several.request("GET", "/v1/models", headers={"origin": "https://example.org"})
    assert headers["access-control-allow-origin"] == "https://example.org"
    _, headers, _ = several.request("GET", "/v1/models", headers={"origin": "https://example.com"})
    assert "access-control-allow-origin" not in headers
    request_headers = {"origin": "https://example.org", "access-control-request-method": "POST"}
    request_headers["access-control-request-headers"] = (
        "authorization,content-type,x-stainless-os,x-stainless-retry-count"
    )
    assert several.request("OPTIONS", GENERATIONS, headers=request_headers)[0] == 200


def test_models_are_served_by_name_and_draw_the_sizes_that_are_asked_for(several: RunningServer) -> None:
    models = several.get("/v1/models")[1]["data"]
    assert [model["id"] for model in models] == ["tiny", "tiny-lumina", "tiny-c2i", "tiny-simplear"]
    described = models[1]["lantern"]
    assert described["max_n"] == 10
    assert (described["size"], described["sizes"][0], len(described["sizes"])) == ("96x96", "128x32", 8)
    for fields, size, pixels in (
        ({"prompt": "red cube"}, "24x24", (24, 24)),
        ({"model": "tiny-lumina"}, "96x96", (24, 24)),
        ({"model": "tiny-lumina", "size": "auto"}, "96x96", (24, 24)),
        ({"model": "tiny-lumina", "size": "64x128"}, "64x128", (16, 32)),
        ({"model": "tiny-simplear", "size": "96x48"}, "96x48", (96, 48)),
    ):
        status, response = several.post({"prompt": "a red fox", "method": "ar", **fields})
        assert (status, response["size"]) == (200, size)
        assert response["lantern"]["model"] == fields.get("model", "tiny")
        with Image.open(BytesIO(base64.b64decode(response["data"][0]["b64_json"]))) as image:
            assert image.size == pixels
    for model, sizes in (("tiny-lumina", "128x32, 128x64, 96x64"), ("tiny-simplear", "64x64, 80x80, 96x48")):
        status, response = several.post({"model": model, "prompt": "a red fox", "size": "512x512"})
        assert (status, response["error"]["param"]) == (400, "size")
        assert response["error"]["message"].startswith(f"size: found '512x512', expected {sizes}")


def test_a_rejection_shows_prompts_that_can_be_drawn_and_no_command_of_a_shell(
    scenes: RunningServer, tiny: RunningServer
) -> None:
    status, response = scenes.post({"prompt": "a red dog on sand"})
    message = response["error"]["message"]
    assert (status, response["error"]["param"]) == (400, "prompt")
    suggestions = re.findall(r"'([^']{12,})'", message.partition("similar valid prompts: ")[2])
    assert len(suggestions) == 3
    assert response["error"]["suggestions"] == suggestions
    assert any("on sand" in prompt for prompt in suggestions)
    preset_message = tiny.post({"prompt": "red cube", "quality_budget": "fast"})[1]["error"]["message"]
    assert preset_message.startswith("quality_budget: bundle tiny has no preset fast")
    assert ANY_WORDS in message
    assert "lantern-rt" not in message.replace(ANY_WORDS, "") + preset_message


def test_classes_are_asked_for_by_number(several: RunningServer) -> None:
    bodies = ({"prompt": "", "class_id": 3}, {"class_id": 3}, {"class_id": 10}, {"prompt": "red cube"}, {})
    statuses = [several.post({"model": "tiny-c2i", **body})[0] for body in bodies]
    assert statuses == [200, 200, 400, 400, 400]


def test_waiting_streams_are_kept_open(scenes: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        name = "slow"

        async def generate(self, request: Any, caller: str) -> Any:
            yield ADMITTED
            await asyncio.sleep(60)

    monkeypatch.setattr(images, "PING_SECONDS", 0.01)
    messages = asyncio.run(send_to_backend(Slow(), {"prompt": "red cube", "stream": True, "deadline": 0.3}))
    assert sum(message.get("body", b"").startswith(b": ping") for message in messages) > 1
    *_, (kind, last_event) = parse_events(b"".join(message.get("body", b"") for message in messages))
    assert (kind, last_event["error"]["code"]) == ("", "deadline_exceeded")


def test_a_body_that_does_not_come_is_given_up() -> None:
    start, response = asyncio.run(send_to_backend(None, None))
    assert start["status"] == 408
    assert json.loads(response["body"])["error"]["message"].startswith("body: incomplete after 0.05 s")


@pytest.mark.parametrize(("kind", "pieces", "status"), [("edits", 4, 408), ("edits", 10, 413), ("generations", 1, 413)])
def test_nothing_is_kept_of_a_body_that_is_rejected(kind: str, pieces: int, status: int) -> None:
    state = ServerState(ServerLimits(body_timeout=0.05))
    state.backends = {"slow": None}  # type: ignore[dict-item]
    first_piece = format_form({"image": b"none"}).partition(b"none")[0] if kind == "edits" else b"{"

    async def receive_pieces() -> int:
        bodies = (bytes(1 << 20) if i else first_piece for i in range(pieces + 1))
        statuses = []

        async def receive() -> Any:
            for body in bodies:
                return {"type": "http.request", "body": body, "more_body": True}
            await asyncio.sleep(60)

        async def send(message: Any) -> None:
            statuses.append(message.get("status"))

        headers = [(b"content-type", FORM.encode() if kind == "edits" else b"application/json")]
        await ImagesEndpoint(state, kind)(make_scope(EDITS, headers), receive, send)
        return statuses[0]

    asyncio.run(receive_pieces())
    gc.disable()  # nothing may need it
    tracemalloc.start()
    try:
        assert asyncio.run(receive_pieces()) == status
        assert tracemalloc.get_traced_memory()[0] < 1 << 19
    finally:
        tracemalloc.stop()
        gc.enable()


async def send_to_backend(backend: Any, content: Any) -> list[Any]:
    """Return the endpoint's messages for a body, or for a client that never sends a body."""
    state = ServerState(ServerLimits(body_timeout=0.05))
    state.backends = {"slow": backend}
    messages = await send_to_app(ImagesEndpoint(state), GENERATIONS, content)
    assert not state.active_requests
    return messages


async def send_to_app(app: Any, path: str, content: Any = None) -> list[Any]:
    """Return an application's messages for a request with or without a body."""
    bodies = iter([json.dumps(content).encode()] if content else [])
    messages: list[Any] = []

    async def receive() -> Any:
        for body in bodies:
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        messages.append(message)

    headers = [(b"content-type", b"application/json")]
    await app(make_scope(path, headers), receive, send)
    return messages


def make_scope(path: str, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    """Return the scope of a request, as the application gives it to an endpoint."""
    method = "POST" if path in (GENERATIONS, EDITS) else "GET"
    state = {"record": RequestRecord("1", "", path)}
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "state": state}
    return {**scope, "query_string": b"", "root_path": ""}


def test_a_client_that_leaves_within_its_request_is_no_error_of_the_server(tiny: RunningServer) -> None:
    lines_before = len(tiny.request_lines())
    with tiny.connect(format_head(GENERATIONS, "application/json", 99) + b'{"prompt": '):
        pass
    wait_until(lambda: len(tiny.request_lines()) > lines_before)
    assert tiny.request_lines()[-1]["status"] == 499
    assert "Traceback" not in tiny.log


def test_metrics_tell_methods_apart_by_their_names_only(tiny: RunningServer) -> None:
    assert tiny.post({"prompt": "red cube", "method": "sjd:window=5"})[0] == 200
    wait_until(lambda: tiny.metric("lantern_images_total", method="sjd", model="tiny") >= 1)
    assert "window" not in tiny.get("/metrics")[1]


def test_a_server_whose_decoder_is_dead_is_neither_ready_nor_live(
    tiny_pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def probe_statuses() -> list[list[int]]:
        pipeline = AsyncPipeline(tiny_pipe)
        state = ServerState(ServerLimits())
        state.backends = {"tiny": LocalBackend(pipeline)}
        status_pairs = []
        app = make_app(state)
        for broken in (False, True, False):
            with monkeypatch.context() as patch:
                if broken:
                    patch.setattr(Batch, "step", lambda batch: (_ for _ in ()).throw(MemoryError("no more")))
                for _ in range(3):
                    await send_to_app(app, GENERATIONS, {"prompt": "red cube", "method": "ar"})
            status_pairs.append([(await send_to_app(app, path))[0]["status"] for path in ("/readyz", "/livez")])
        await asyncio.to_thread(pipeline.service.close)
        return status_pairs

    assert asyncio.run(probe_statuses()) == [[200, 200], [503, 503], [200, 200]]


def test_the_api_describes_itself(tiny: RunningServer) -> None:
    status, document = tiny.get("/openapi.json")
    assert (status, document["openapi"], document["info"]["version"]) == (200, "3.1.0", version("lantern-rt"))
    for path in document["paths"]:
        assert tiny.request("GET", path)[0] in (200, 405), path
    schemas = document["components"]["schemas"]
    assert {name.rpartition("/")[2] for name in re.findall(r'"\$ref": "(.*?)"', json.dumps(document))} <= schemas.keys()
    assert schemas["ImagesRequest"]["properties"].keys() == ImagesRequest.model_fields.keys()
    response = tiny.post({"prompt": "red cube"})[1]
    assert schemas["Images"]["properties"].keys() == response.keys()
    assert schemas["Figures"]["properties"].keys() == response["lantern"].keys()
    page = tiny.get("/docs")[1]
    for script in re.findall(r'(?:src|href)="(.*?)"', page):
        assert tiny.request("GET", f"/{script}")[0] == 200
