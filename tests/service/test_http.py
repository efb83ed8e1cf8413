"""Test responses to invalid, late and cancelled requests, and the logs, metrics and API document of the server."""

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
from refusals import catch_error
from running_server import EDITS, FORM, GENERATIONS, RunningServer, format_form, format_head, parse_events, wait_until

from lantern_rt import AsyncPipeline, Pipeline
from lantern_rt.runtime.batch import Batch
from lantern_rt.serve import images
from lantern_rt.serve.app import make_app
from lantern_rt.serve.backend import ADMITTED, LocalBackend
from lantern_rt.serve.images import ImagesEndpoint
from lantern_rt.serve.log import RequestRecord
from lantern_rt.serve.protocol import HttpError, ImagesRequest
from lantern_rt.serve.state import BodyMemoryBudget, ServerLimits, ServerState
from lantern_rt.text.words import ANY_WORDS_SERVED

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
def test_an_invalid_request_body_is_rejected_with_a_one_line_message(
    tiny_server: RunningServer, body: bytes, headers: dict[str, str], status: int
) -> None:
    response_status, response_headers, text = tiny_server.request("POST", GENERATIONS, body, headers)
    assert (response_status, response_headers["content-type"]) == (status, "application/json")
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]
    assert len(error["message"]) < 500
    assert "Traceback" not in tiny_server.log


def test_unknown_paths_and_methods_get_status_404_or_405_and_a_message(tiny_server: RunningServer) -> None:
    for method, path, status in (
        ("GET", GENERATIONS, 405),
        ("GET", "/v1/images/edits", 405),
        ("GET", "/nothing", 404),
        ("GET", "/page/../app.py", 404),
        ("GET", "/page/..%2fapp.py", 404),
    ):
        response_status, _, text = tiny_server.request(method, path)
        assert response_status == status
        assert json.loads(text)["error"]["message"]


def test_a_request_that_exceeds_its_deadline_gets_status_504(scenes_server: RunningServer) -> None:
    aborted_before = scenes_server.read_metric("lantern_aborted_total", model="scenes", reason="deadline")
    body = {"prompt": "a red sphere on sand", "method": "ar", "n": 4, "deadline": 0.2}
    status, response = scenes_server.post(body)
    assert (status, response["error"]["code"], response["error"]["param"]) == (504, "deadline_exceeded", "deadline")
    wait_until(lambda: scenes_server.read_metric("lantern_images_running", model="scenes") == 0)
    assert scenes_server.read_metric("lantern_aborted_total", model="scenes", reason="deadline") == aborted_before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_images_of_a_disconnected_client_are_cancelled(scenes_server: RunningServer, stream: bool) -> None:
    labels = {"model": "scenes", "reason": "disconnected"}
    aborted_before = scenes_server.read_metric("lantern_aborted_total", **labels)
    body = {"prompt": "a red sphere on sand", "method": "ar", "n": 1 if stream else 4}
    body |= {"stream": True, "steps": True} if stream else {}
    with scenes_server.open_request(body) as connection:
        wait_until(lambda: scenes_server.read_metric("lantern_images_running", model="scenes") > 0)
        if stream:
            assert connection.getresponse().read(5)
    wait_until(lambda: scenes_server.read_metric("lantern_images_running", model="scenes") == 0)
    wait_until(lambda: scenes_server.read_metric("lantern_aborted_total", **labels) == aborted_before + 1)
    wait_until(lambda: scenes_server.read_request_log()[-1]["status"] == 499)


def test_step_events_report_how_every_code_was_generated(scenes_server: RunningServer) -> None:
    # d: accepted draft token; r: accepted by relaxation; x: sampled after a rejected draft token; n: no draft token
    kinds_by_method: dict[str, set[str]] = {}
    for method in ("ar", "sjd:window=3", "eagle", "lantern++:lambda=8"):
        fields = {"prompt": "a red sphere on sand", "seed": 1, "method": method}
        *steps, (event_type, last_event) = scenes_server.stream(fields)
        assert event_type == "image_generation.completed"
        assert {step_type for step_type, _ in steps} == {"lantern.step"}
        kinds = "".join(data["kinds"] for _, data in steps)
        assert len(kinds) == 256 == steps[-1][1]["done"]
        assert last_event["lantern"]["target_passes"] >= len(steps)
        kinds_by_method[method] = set(kinds)
    assert kinds_by_method["ar"] == {"n"}
    for method, is_exact in (("sjd:window=3", True), ("eagle", True), ("lantern++:lambda=8", False)):
        assert {"d", "x", "n"} <= kinds_by_method[method]
        assert ("r" in kinds_by_method[method]) != is_exact


def test_requests_are_counted_and_logged_without_prompts(tiny_server: RunningServer) -> None:
    def read_counts() -> tuple[float, float, float]:
        """Return the numbers of accepted requests, tokens and passes."""
        requests = tiny_server.read_metric("lantern_requests_total", model="tiny", code="200")
        tokens, passes = (
            tiny_server.read_metric(f"lantern_{name}_total", model="tiny") for name in ("tokens", "target_passes")
        )
        return requests, tokens, passes

    tiny_server.post({"prompt": "red cube"}, **{"x-request-id": "mine-0"})
    tiny_server.wait_for_log_line("mine-0")  # earlier requests are counted now
    requests, tokens, passes = read_counts()
    headers = {"x-request-id": "mine-1"}
    assert tiny_server.post({"prompt": "red cube", "n": 2, "method": "ar", "seed": 1}, **headers)[0] == 200
    line = tiny_server.wait_for_log_line("mine-1")
    requests_after, tokens_after, passes_after = read_counts()
    assert (requests_after - requests, tokens_after - tokens) == (1, 72)
    assert passes_after - passes >= 72, "a tie of two tokens takes another forward pass"
    assert (line["status"], line["method"], line["images"]) == (200, "ar", 2)
    assert tiny_server.post({"prompt": "red dragon"}, **{"x-request-id": "mine-2"})[0] == 400
    assert tiny_server.post(b'{"prompt": "red dragon', **{"x-request-id": "mine-3"})[0] == 400
    tiny_server.wait_for_log_line("mine-3")
    assert "red cube" not in tiny_server.log
    assert "dragon" not in tiny_server.log
    assert tiny_server.post({"prompt": "red cube"}, **{"x-request-id": "a b"})[0] == 200
    assert not any(line["request_id"] == "a b" for line in tiny_server.read_request_log())


def test_rejected_requests_are_logged_and_counted_and_health_checks_are_not(tiny_server: RunningServer) -> None:
    requests: list[tuple[str, str, dict[str, str], int]] = [
        ("GET", "/wp-login.php", {}, 404),
        ("GET", GENERATIONS, {}, 405),
        ("GET", "/v1/models/others", {}, 404),
        ("GET", "/v1/models", {"host": "other.example"}, 403),
        ("POST", GENERATIONS, {**JSON, "origin": "https://other.example"}, 403),
        ("GET", "/livez", {}, 200),
        ("GET", "/v1/models", {}, 200),
    ]
    count_before = tiny_server.read_metric("lantern_requests_total", model="", code="403")
    for i, (method, path, headers, status) in enumerate(requests):
        assert tiny_server.request(method, path, headers={**headers, "x-request-id": f"refused-{i}"})[0] == status
    assert tiny_server.get("/v1/models/others", **{"x-request-id": "refused-7"})[0] == 404
    tiny_server.wait_for_log_line("refused-7")
    logged_requests = [
        (line["request_id"], line["path"], line["status"])
        for line in tiny_server.read_request_log()
        if line["request_id"].startswith("refused-")
    ]
    expected_requests = [(f"refused-{i}", path, status) for i, (_, path, _, status) in enumerate(requests[:5])]
    assert logged_requests == [*expected_requests, ("refused-7", "/v1/models/others", 404)]
    assert tiny_server.read_metric("lantern_requests_total", model="", code="403") == count_before + 2


def test_responses_have_security_headers_and_no_cors_header(tiny_server: RunningServer) -> None:
    request_headers = {"origin": "https://example.org", "x-request-id": "mine-4"}
    status, headers, body = tiny_server.request("GET", "/", headers=request_headers)
    assert headers["x-request-id"] == "mine-4"
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers
    assert b"<script>" not in body


@pytest.fixture(scope="module")
def multi_model_server(
    start_server: Callable[..., RunningServer],
    tiny_folder: Path,
    lumina_bundle: Path,
    c2i_bundle: Path,
    simplear_bundle: Path,
) -> RunningServer:
    """Start a server of four models: one image size, several, class conditions, and again several."""
    bundles = (tiny_folder, lumina_bundle, c2i_bundle, simplear_bundle)
    return start_server(*bundles, "--threads=1", "--cors=https://example.org")


def test_only_origins_in_option_cors_get_cors_headers(multi_model_server: RunningServer) -> None:
    _, headers, _ = multi_model_server.request("GET", "/v1/models", headers={"origin": "https://example.org"})
    assert headers["access-control-allow-origin"] == "https://example.org"
    _, headers, _ = multi_model_server.request("GET", "/v1/models", headers={"origin": "https://example.com"})
    assert "access-control-allow-origin" not in headers
    names = "authorization,content-type,x-stainless-os,x-stainless-retry-count"
    request_headers = {"access-control-request-method": "POST", "access-control-request-headers": names}
    request_headers["origin"] = "https://example.org"
    assert multi_model_server.request("OPTIONS", GENERATIONS, headers=request_headers)[0] == 200


def test_a_request_selects_the_model_by_name_and_the_image_size(multi_model_server: RunningServer) -> None:
    models = multi_model_server.get("/v1/models")[1]["data"]
    assert [model["id"] for model in models] == ["tiny", "tiny-lumina", "tiny-c2i", "tiny-simplear"]
    description = models[1]["lantern"]
    assert description["max_n"] == 10
    assert (description["size"], description["sizes"][0], len(description["sizes"])) == ("96x96", "128x32", 8)
    for fields, size, pixels in (
        ({"prompt": "red cube"}, "24x24", (24, 24)),
        ({"model": "tiny-lumina"}, "96x96", (24, 24)),
        ({"model": "tiny-lumina", "size": "auto"}, "96x96", (24, 24)),
        ({"model": "tiny-lumina", "size": "64x128"}, "64x128", (16, 32)),
        ({"model": "tiny-simplear", "size": "96x48"}, "96x48", (96, 48)),
    ):
        status, response = multi_model_server.post({"prompt": "a red fox", "method": "ar", **fields})
        assert (status, response["size"]) == (200, size)
        assert response["lantern"]["model"] == fields.get("model", "tiny")
        with Image.open(BytesIO(base64.b64decode(response["data"][0]["b64_json"]))) as image:
            assert image.size == pixels
    for model, sizes in (("tiny-lumina", "128x32, 128x64, 96x64"), ("tiny-simplear", "64x64, 80x80, 96x48")):
        status, response = multi_model_server.post({"model": model, "prompt": "a red fox", "size": "512x512"})
        assert (status, response["error"]["param"]) == (400, "size")
        assert response["error"]["message"].startswith(f"size: found '512x512', expected {sizes}")


def test_a_rejected_prompt_gets_suggestions_of_valid_prompts_and_no_shell_command(
    scenes_server: RunningServer, tiny_server: RunningServer
) -> None:
    status, response = scenes_server.post({"prompt": "a red dog on sand"})
    message = response["error"]["message"]
    assert (status, response["error"]["param"]) == (400, "prompt")
    suggestions = re.findall(r"'([^']{12,})'", message.partition("similar valid prompts: ")[2])
    assert len(suggestions) == 3
    assert response["error"]["suggestions"] == suggestions
    assert any("on sand" in prompt for prompt in suggestions)
    preset_message = tiny_server.post({"prompt": "red cube", "quality_budget": "fast"})[1]["error"]["message"]
    assert preset_message.startswith("quality_budget: bundle tiny has no preset fast")
    assert ANY_WORDS_SERVED in message
    assert "lantern-rt" not in message.replace(ANY_WORDS_SERVED, "") + preset_message


def test_a_class_conditional_model_requires_a_valid_class_id(multi_model_server: RunningServer) -> None:
    bodies = ({"prompt": "", "class_id": 3}, {"class_id": 3}, {"class_id": 10}, {"prompt": "red cube"}, {})
    statuses = [multi_model_server.post({"model": "tiny-c2i", **body})[0] for body in bodies]
    assert statuses == [200, 200, 400, 400, 400]


def test_a_waiting_stream_gets_ping_comments_until_its_deadline(
    scenes_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowBackend:
        name = "slow"

        async def generate(self, request: Any, caller: str) -> Any:
            yield ADMITTED
            await asyncio.sleep(60)

    monkeypatch.setattr(images, "PING_SECONDS", 0.01)
    messages = asyncio.run(send_to_backend(SlowBackend(), {"prompt": "red cube", "stream": True, "deadline": 0.3}))
    assert sum(message.get("body", b"").startswith(b": ping") for message in messages) > 1
    *_, (event_type, last_event) = parse_events(b"".join(message.get("body", b"") for message in messages))
    assert (event_type, last_event["error"]["code"]) == ("", "deadline_exceeded")


def test_a_request_with_a_missing_body_gets_status_408() -> None:
    response_start, response = asyncio.run(send_to_backend(None, None))
    assert response_start["status"] == 408
    assert json.loads(response["body"])["error"]["message"].startswith("body: incomplete after 0.05 s")


@pytest.mark.parametrize(
    ("operation", "num_pieces", "status"), [("edits", 4, 408), ("edits", 10, 413), ("generations", 1, 413)]
)
def test_the_memory_of_a_rejected_body_is_released(operation: str, num_pieces: int, status: int) -> None:
    state = ServerState(ServerLimits(body_timeout=0.05))
    state.backends = {"slow": None}  # type: ignore[dict-item]
    first_piece = format_form({"image": b"none"}).partition(b"none")[0] if operation == "edits" else b"{"

    async def send_pieces() -> int:
        bodies = (bytes(1 << 20) if i else first_piece for i in range(num_pieces + 1))
        statuses = []

        async def receive() -> Any:
            for body in bodies:
                return {"type": "http.request", "body": body, "more_body": True}
            await asyncio.sleep(60)

        async def send(message: Any) -> None:
            statuses.append(message.get("status"))

        headers = [(b"content-type", FORM.encode() if operation == "edits" else b"application/json")]
        await ImagesEndpoint(state, operation)(make_scope(EDITS, headers), receive, send)
        return statuses[0]

    asyncio.run(send_pieces())
    gc.disable()  # memory must be released without garbage collection
    tracemalloc.start()
    try:
        assert asyncio.run(send_pieces()) == status
        assert tracemalloc.get_traced_memory()[0] < 1 << 19
    finally:
        tracemalloc.stop()
        gc.enable()


def test_memory_is_reserved_as_the_bytes_of_large_bodies_arrive() -> None:
    budget = BodyMemoryBudget(100)
    with budget.open_account("one") as reserve_for_one, budget.open_account("two") as reserve_for_two:
        reserve_for_one(40)
        assert catch_error(HttpError, reserve_for_one, 20).status == 429
        reserve_for_two(30)
    with budget.open_account("two") as reserve_for_two:
        reserve_for_two(50)


@pytest.mark.parametrize(
    ("key_name", "client", "caller"),
    [
        ("mine", "10.0.0.1", "mine"),
        ("", "10.0.0.1", "10.0.0.1"),
        ("", "2001:db8:1:2:3::4", "20010db800010002::/64"),
        ("", "2001:db8:1:2:ffff::", "20010db800010002::/64"),
        ("", "::ffff:10.0.0.1", "::ffff:10.0.0.1"),
        ("", "", ""),
    ],
)
def test_callers_are_keys_addresses_and_ipv6_networks(key_name: str, client: str, caller: str) -> None:
    assert RequestRecord("1", client, "/", key_name=key_name).caller == caller


async def send_to_backend(backend: Any, content: Any) -> list[Any]:
    """Return the ASGI messages of the images endpoint for a request to one backend; None as content sends no body."""
    state = ServerState(ServerLimits(body_timeout=0.05))
    state.backends = {"slow": backend}
    messages = await send_to_app(ImagesEndpoint(state), GENERATIONS, content)
    assert not state.active_requests
    return messages


async def send_to_app(app: Any, path: str, content: Any = None) -> list[Any]:
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
    method = "POST" if path in (GENERATIONS, EDITS) else "GET"
    state = {"record": RequestRecord("1", "", path)}
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "state": state}
    return {**scope, "query_string": b"", "root_path": ""}


def test_a_client_that_disconnects_while_sending_is_logged_with_status_499(tiny_server: RunningServer) -> None:
    count_before = [line["status"] for line in tiny_server.read_request_log()].count(499)
    with tiny_server.connect(format_head(GENERATIONS, "application/json", 99) + b'{"prompt": '):
        pass
    wait_until(lambda: [line["status"] for line in tiny_server.read_request_log()].count(499) == count_before + 1)
    assert "Traceback" not in tiny_server.log


def test_metrics_label_methods_by_name_without_parameters(tiny_server: RunningServer) -> None:
    assert tiny_server.post({"prompt": "red cube", "method": "sjd:window=5"})[0] == 200
    wait_until(lambda: tiny_server.read_metric("lantern_images_total", method="sjd", model="tiny") >= 1)
    assert "window" not in tiny_server.get("/metrics")[1]


def test_health_checks_fail_while_decoding_fails_and_then_recover(
    tiny_pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def probe_statuses() -> list[list[int]]:
        pipeline = AsyncPipeline(tiny_pipe)
        state = ServerState(ServerLimits())
        state.backends = {"tiny": LocalBackend(pipeline)}
        status_pairs = []
        app = make_app(state)
        for is_broken in (False, True, False):
            with monkeypatch.context() as patch:
                if is_broken:
                    patch.setattr(Batch, "step", lambda batch: (_ for _ in ()).throw(MemoryError("no more")))
                for _ in range(3):
                    await send_to_app(app, GENERATIONS, {"prompt": "red cube", "method": "ar"})
            status_pairs.append([(await send_to_app(app, path))[0]["status"] for path in ("/readyz", "/livez")])
        await asyncio.to_thread(pipeline.service.close)
        return status_pairs

    assert asyncio.run(probe_statuses()) == [[200, 200], [503, 503], [200, 200]]


def test_the_openapi_document_matches_the_endpoints_and_the_responses(tiny_server: RunningServer) -> None:
    status, document = tiny_server.get("/openapi.json")
    assert (status, document["openapi"], document["info"]["version"]) == (200, "3.1.0", version("lantern-rt"))
    for path in document["paths"]:
        assert tiny_server.request("GET", path)[0] in (200, 405), path
    schemas = document["components"]["schemas"]
    assert {name.rpartition("/")[2] for name in re.findall(r'"\$ref": "(.*?)"', json.dumps(document))} <= schemas.keys()
    assert schemas["ImagesRequest"]["properties"].keys() == ImagesRequest.model_fields.keys()
    response = tiny_server.post({"prompt": "red cube"})[1]
    assert schemas["Images"]["properties"].keys() == response.keys()
    assert schemas["Figures"]["properties"].keys() == response["lantern"].keys()
    page = tiny_server.get("/docs")[1]
    for script in re.findall(r'(?:src|href)="(.*?)"', page):
        assert tiny_server.request("GET", f"/{script}")[0] == 200
