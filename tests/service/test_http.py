"""What the server says to requests that are wrong, late or gone, and what it tells of itself."""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from running_server import GENERATIONS, RunningServer, events, until

from lantern_rt import open_bundle

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
        (b'{"prompt": "red cube", "seed": -1}', JSON, 400),
        (b'{"prompt": "red \\ud800 cube"}', JSON, 400),
        (b'{"prompt": "red cube", "method": "eagle:tree=/etc/passwd.json"}', JSON, 400),
        (b'{"prompt": "red cube", "method": "sjd:window=1000000"}', JSON, 400),
    ],
)
def test_a_wrong_body_is_refused_in_one_line(
    tiny: RunningServer, body: bytes, headers: dict[str, str], status: int
) -> None:
    found, answered, text = tiny.request("POST", GENERATIONS, body, headers)
    assert (found, answered["content-type"]) == (status, "application/json")
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]
    assert len(error["message"]) < 500
    assert "Traceback" not in tiny.log


def test_files_of_the_server_are_nobodys_trees(tiny: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text("[[0]]")
    status, answer = tiny.post({"prompt": "red cube", "method": f"eagle:tree={tmp_path}/tree.json"})
    assert status == 400
    assert answer["error"]["param"] == "method"


def test_paths_and_methods_that_do_not_exist_are_told_so(tiny: RunningServer) -> None:
    for method, path, status in (
        ("GET", GENERATIONS, 405),
        ("POST", "/v1/images/edits", 404),
        ("GET", "/nothing", 404),
        ("GET", "/page/../app.py", 404),
        ("GET", "/page/..%2fapp.py", 404),
    ):
        found, _, text = tiny.request(method, path)
        assert found == status
        assert json.loads(text)["error"]["message"]


def test_a_request_that_takes_too_long_ends_at_its_deadline(scenes: RunningServer) -> None:
    before = scenes.metric("lantern_aborted_total", model="scenes", reason="deadline")
    asked = {"prompt": "a red sphere on sand", "method": "ar", "n": 4, "deadline": 0.2}
    began = time.monotonic()
    status, answer = scenes.post(asked)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (504, "deadline_exceeded", "deadline")
    assert time.monotonic() - began < 5
    until(lambda: scenes.metric("lantern_images_running", model="scenes") == 0)
    assert scenes.metric("lantern_aborted_total", model="scenes", reason="deadline") == before + 1


def test_a_stream_that_takes_too_long_ends_with_an_error(scenes: RunningServer) -> None:
    asked = {"prompt": "a red sphere on sand", "method": "ar", "stream": True, "steps": True, "deadline": 0.2}
    status, headers, body = scenes.request("POST", GENERATIONS, json.dumps(asked).encode(), JSON)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    *steps, (kind, last) = events(body)
    assert steps
    assert (kind, last["error"]["code"]) == ("", "deadline_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_places(scenes: RunningServer, stream: bool) -> None:
    before = scenes.metric("lantern_aborted_total", model="scenes", reason="disconnected")
    asked = {"prompt": "a red sphere on sand", "method": "ar", "n": 1 if stream else 4}
    asked |= {"stream": True, "steps": True} if stream else {}
    with scenes.open(asked) as connection:
        until(lambda: scenes.metric("lantern_images_running", model="scenes") > 0)
        if stream:
            assert connection.getresponse().read(5)
    began = time.monotonic()
    until(lambda: scenes.metric("lantern_images_running", model="scenes") == 0)
    assert time.monotonic() - began < 1
    until(lambda: scenes.metric("lantern_aborted_total", model="scenes", reason="disconnected") == before + 1)
    until(lambda: scenes.lines()[-1]["status"] == 499)


def test_steps_tell_how_every_code_came_to_be(scenes: RunningServer) -> None:
    letters: dict[str, set[str]] = {}
    for method in ("ar", "sjd:window=3", "eagle", "lantern++:lambda=8", "sjd:omega=4"):
        asked = {"prompt": "a red sphere on sand", "seed": 1, "method": method, "stream": True, "steps": True}
        _, _, body = scenes.request("POST", GENERATIONS, json.dumps(asked).encode(), JSON)
        *steps, (kind, last) = events(body)
        assert kind == "image_generation.completed"
        assert {kind for kind, _ in steps} == {"lantern.step"}
        kinds = "".join(data["kinds"] for _, data in steps)
        assert len(kinds) == 256 == steps[-1][1]["done"]
        assert last["lantern"]["target_passes"] >= len(steps)
        letters[method] = set(kinds)
    assert letters["ar"] == {"n"}
    for method, exact in (
        ("sjd:window=3", True),
        ("eagle", True),
        ("lantern++:lambda=8", False),
        ("sjd:omega=4", False),
    ):
        assert {"d", "x", "n"} <= letters[method]
        assert ("r" in letters[method]) != exact


def test_requests_are_counted_and_logged_without_their_prompts(tiny: RunningServer) -> None:
    names = ("lantern_requests_total", "lantern_tokens_total", "lantern_target_passes_total")
    labels: list[dict[str, str]] = [{"model": "tiny", "code": "200"}, {"model": "tiny"}, {"model": "tiny"}]
    before = [tiny.metric(name, **own) for name, own in zip(names, labels, strict=True)]
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"x-request-id": "mine-1", "traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    assert tiny.post({"prompt": "red cube", "n": 2, "method": "ar", "seed": 1}, **headers)[0] == 200
    until(lambda: tiny.metric(names[0], **labels[0]) > before[0])
    after = [tiny.metric(name, **own) for name, own in zip(names, labels, strict=True)]
    assert [new - old for new, old in zip(after, before, strict=True)][:2] == [1, 72]
    assert after[2] - before[2] >= 72, "ties take passes, too"
    until(lambda: any(line["request_id"] == "mine-1" for line in tiny.lines()))
    line = next(line for line in tiny.lines() if line["request_id"] == "mine-1")
    assert (line["status"], line["method"], line["images"], line["trace_id"]) == (200, "ar", 2, trace)
    assert tiny.post({"prompt": "red dragon"}, **{"x-request-id": "mine-2"})[0] == 400
    assert tiny.post(b'{"prompt": "red dragon', **{"x-request-id": "mine-3"})[0] == 400
    until(lambda: any(line["request_id"] == "mine-3" for line in tiny.lines()))
    assert "red cube" not in tiny.log
    assert "dragon" not in tiny.log
    assert tiny.post({"prompt": "red cube"}, **{"x-request-id": "a b"})[0] == 200
    assert not any(line["request_id"] == "a b" for line in tiny.lines())


def test_prompts_are_logged_where_that_is_asked_for(start: Callable[..., RunningServer], tiny_folder: Path) -> None:
    server = start(tiny_folder, "--threads", 1, "--log-prompts")
    server.post({"prompt": "green cube on sand"})
    until(lambda: [line.get("prompt") for line in server.lines()] == ["green cube on sand"])


def test_answers_carry_safe_headers_and_other_sites_may_not_read_them(tiny: RunningServer) -> None:
    status, headers, body = tiny.request("GET", "/", headers={"origin": "https://example.org"})
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers
    assert b"<script>" not in body


def test_named_sites_may_ask(start: Callable[..., RunningServer], tiny_folder: Path) -> None:
    server = start(tiny_folder, "--threads", 1, "--cors", "https://example.org")
    _, headers, _ = server.request("GET", "/v1/models", headers={"origin": "https://example.org"})
    assert headers["access-control-allow-origin"] == "https://example.org"
    _, headers, _ = server.request("GET", "/v1/models", headers={"origin": "https://example.com"})
    assert "access-control-allow-origin" not in headers
    asked = {"origin": "https://example.org", "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "content-type"
    assert server.request("OPTIONS", GENERATIONS, headers=asked)[0] == 200


def test_two_models_are_served_by_name(start: Callable[..., RunningServer], tiny_folder: Path) -> None:
    server = start(tiny_folder, "scenes", "--threads", 1)
    assert [model["id"] for model in server.get("/v1/models")[1]["data"]] == ["tiny", "scenes"]
    side = open_bundle("scenes").manifest.image_width
    for asked, size in (({}, "24x24"), ({"model": "scenes"}, f"{side}x{side}")):
        status, answer = server.post({"prompt": "red cube on sand", **asked})
        assert (status, answer["size"]) == (200, size)
        assert answer["lantern"]["model"] == asked.get("model", "tiny")


def test_a_model_of_several_sizes_draws_the_one_that_is_asked_for(
    start: Callable[..., RunningServer], lumina_bundle: Path
) -> None:
    server = start(lumina_bundle, "--threads", 1)
    described = server.get("/v1/models")[1]["data"][0]["lantern"]
    assert (described["size"], described["sizes"][0], len(described["sizes"])) == ("96x96", "128x32", 8)
    for asked, size, pixels in (
        ({}, "96x96", (24, 24)),
        ({"size": "auto"}, "96x96", (24, 24)),
        ({"size": "64x128"}, "64x128", (16, 32)),
    ):
        status, answer = server.post({"prompt": "a red fox", "method": "ar", **asked})
        assert (status, answer["size"]) == (200, size)
        with Image.open(BytesIO(base64.b64decode(answer["data"][0]["b64_json"]))) as image:
            assert image.size == pixels
    status, answer = server.post({"prompt": "a red fox", "size": "512x512"})
    assert (status, answer["error"]["param"]) == (400, "size")
    assert answer["error"]["message"].startswith("size: found '512x512', expected 128x32, 128x64, 96x64")


def test_classes_are_asked_for_by_number(start: Callable[..., RunningServer], tmp_path: Path) -> None:
    from tiny_bundle import make_tiny_bundle

    server = start(make_tiny_bundle(tmp_path / "tiny", "class"), "--threads", 1)
    assert server.post({"prompt": "", "class_id": 3})[0] == 200
    assert server.post({"class_id": 3})[0] == 200
    for asked in ({"class_id": 10}, {"prompt": "red cube"}, {}):
        assert server.post(asked)[0] == 400


def test_waiting_streams_are_kept_open(tiny: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    from lantern_rt.serve.images import with_pauses

    async def main() -> list[Any]:
        async def slow() -> Any:
            for i in range(3):
                await asyncio.sleep(0.05)
                yield i

        found = [update async for update in with_pauses(slow(), 0.02)]
        stopped = slow()
        async for _ in with_pauses(stopped, 0.001):
            break
        return found

    found = asyncio.run(main())
    assert [one for one in found if one is not None] == [0, 1, 2]
    assert found.count(None) >= 3


def test_connections_are_used_again(tiny: RunningServer) -> None:
    connection = http.client.HTTPConnection(tiny.address, timeout=60)
    for asked in ({"prompt": "red cube"}, {"prompt": "wrong"}, {"prompt": "red cube", "stream": True}) * 2:
        connection.request("POST", GENERATIONS, json.dumps(asked).encode(), JSON)
        answer = connection.getresponse()
        assert answer.read()
        assert answer.status == (400 if asked["prompt"] == "wrong" else 200)
    connection.close()


def test_many_at_once_are_all_answered(tiny: RunningServer) -> None:
    found: list[int] = []

    def ask(seed: int) -> None:
        found.append(tiny.post({"prompt": "red cube", "seed": seed, "n": 1 + seed % 3})[0])

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * 24
