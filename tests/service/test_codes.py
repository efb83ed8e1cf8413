"""Request codes over HTTP: of every bundle at /v1/images/codes, of GLM-Image also as SGLang does at /generate."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from running_server import RunningServer, format_head, parse_events, wait_until

from lantern_rt import Pipeline

FOLDER = Path(__file__).parent.parent / "data/glm-image"
TRACES = {trace["name"]: trace for trace in json.loads((FOLDER / "traces.json").read_text()) if trace["name"] != "i2i"}
GREEDY = [trace for trace in TRACES.values() if not trace["sample"]]
CODES = "/v1/images/codes"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def glm(start: Callable[..., RunningServer], glm_image_bundle: Path) -> RunningServer:
    return start(glm_image_bundle, "--threads", 1, "--batch", 8)


@pytest.fixture(scope="module")
def glm_pipe(glm_image_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(glm_image_bundle, threads=1)


def post(server: RunningServer, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    status, _, response = server.request("POST", path, json.dumps(body).encode(), JSON | headers)
    return status, json.loads(response)


def sglang_body(trace: dict[str, Any], seed: int | None = 1, **sampling: Any) -> dict[str, Any]:
    """Return the body that SGLang sends for an image."""
    grids = [[1, *trace["large_grid"]], [1, *trace["small_grid"]]]
    limit = {"max_new_tokens": trace["max_new_tokens"], "ignore_eos": True, "sampling_seed": seed}
    return {
        "input_ids": trace["prompt_ids"],
        "image_data": [{"image_grid_thw": grids}],
        "sampling_params": {"temperature": 1.0, **limit, **sampling},
    }


def join_bodies(*calls: dict[str, Any]) -> dict[str, Any]:
    """Return the body that SGLang sends for several images."""
    return {name: [body[name] for body in calls] for name in calls[0]}


def pipeline_arguments(trace: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the arguments of `Pipeline` for the same image."""
    return {"token_ids": trace["prompt_ids"], "size": f"{trace['width']}x{trace['height']}", **options}


def published_codes(trace: dict[str, Any]) -> list[int]:
    """Return the published codes of a greedy image, without the id after them."""
    return trace["generated_ids"][: trace["max_new_tokens"] - 1]


def test_a_source_image_in_base64_gives_the_codes_of_the_pipeline(glm: RunningServer, glm_pipe: Pipeline) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (96, 160, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    assert len(file.getvalue()) > 32 << 10
    body = {"prompt": "a red fox", "seed": 4, "image": base64.b64encode(file.getvalue()).decode()}
    status, response = post(glm, CODES, body)
    assert (status, response["size"]) == (200, "160x96"), response
    (data,) = response["data"]
    assert data["first_codes"] == []
    assert np.ravel(data["codes"]).tolist() == glm_pipe("a red fox", image=file.getvalue(), seed=4).codes[0].tolist()
    for image, field in (("AAAA", "image"), ("no base64", "image"), (7, "image")):
        status, response = post(glm, CODES, body | {"image": image})
        assert (status, response["error"]["param"]) == (400, field)


def test_a_bundle_without_source_images_rejects_one(start: Callable[..., RunningServer]) -> None:
    status, response = post(start("scenes"), CODES, {"prompt": "a red cube on sand", "image": "AAAA"})
    assert (status, response["error"]["param"]) == (400, "image")
    assert "takes no source image" in response["error"]["message"]


def test_sglang_gets_the_published_ids_of_one_image_and_of_several_sizes_at_once(glm: RunningServer) -> None:
    greedy = {"temperature": 1.0, "top_k": 1}
    status, response = post(glm, "/generate", sglang_body(GREEDY[0], **greedy))
    assert (status, response["output_ids"]) == (200, published_codes(GREEDY[0]))
    assert response["meta_info"]["prompt_tokens"] == len(GREEDY[0]["prompt_ids"])
    assert response["meta_info"]["completion_tokens"] == len(response["output_ids"])
    status, responses = post(glm, "/generate", join_bodies(*(sglang_body(trace, **greedy) for trace in GREEDY)))
    assert (status, [image_answer["output_ids"] for image_answer in responses]) == (
        200,
        [published_codes(trace) for trace in GREEDY],
    )
    assert glm.request("GET", "/health")[0] == 200


def test_a_seed_of_sglang_is_the_seed_of_the_pipeline_and_null_draws_one_that_is_told(
    glm: RunningServer, glm_pipe: Pipeline
) -> None:
    first_trace, second_trace, third_trace = GREEDY[:3]
    calls = (
        sglang_body(first_trace, 3),
        sglang_body(second_trace, 4, temperature=0.7, top_p=0.5),
        sglang_body(third_trace, None),
    )
    _, (first_response, second_response, drawn) = post(glm, "/generate", join_bodies(*calls))
    seed = drawn["meta_info"]["sampling_seed"]
    expected = [
        glm_pipe(**pipeline_arguments(first_trace, seed=3, temperature=1.0)),
        glm_pipe(**pipeline_arguments(second_trace, seed=4, temperature=0.7, top_p=0.5)),
        glm_pipe(**pipeline_arguments(third_trace, seed=seed, temperature=1.0)),
    ]
    assert [image_answer["output_ids"] for image_answer in (first_response, second_response, drawn)] == [
        result.codes[0].tolist() for result in expected
    ]
    _, again = post(glm, "/generate", sglang_body(third_trace, None))
    assert again["meta_info"]["sampling_seed"] != seed


def test_the_settings_of_sglang_can_be_left_to_the_model(
    start: Callable[..., RunningServer], glm_image_bundle: Path, glm_pipe: Pipeline
) -> None:
    server = start(glm_image_bundle, "--threads", 1, "--own-sampling")
    _, response = post(server, "/generate", sglang_body(GREEDY[0], 3))
    default = glm_pipe(**pipeline_arguments(GREEDY[0], seed=3)).codes[0].tolist()
    assert (
        response["output_ids"]
        == default
        != glm_pipe(**pipeline_arguments(GREEDY[0], seed=3, temperature=1.0)).codes[0].tolist()
    )


def copy_json(body: dict[str, Any], *path: Any, value: Any) -> dict[str, Any]:
    """Copy the body with the value at `path` replaced or added."""
    copy = json.loads(json.dumps(body))
    place = copy
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return copy


GRIDS = ("image_data", 0, "image_grid_thw")
WRONG = [
    (("text",), "a fox", "text"),
    (("input_ids",), [], "input_ids"),
    (("input_ids",), [5, 6, 7], "input_ids"),  # not the end of the template
    (("input_ids", 0), 1 << 40, "input_ids"),
    (("input_ids", 0), 5000, "input_ids"),  # not in the vocabulary
    (("input_ids", 0), -1, "input_ids"),
    (("input_ids",), "text", "input_ids"),
    (GRIDS, [[1, 9, 9], [1, 16, 16]], "image_grid_thw"),
    (GRIDS, [[1, 3, 5]], "image_grid_thw"),
    (GRIDS, [[1, 12, 20], [1, 3, 5]], "image_grid_thw"),  # first grid and grid in the wrong order
    (("image_data",), [], "image_data"),
    (("sampling_params", "max_new_tokens"), 254, "max_new_tokens"),
    (("sampling_params", "ignore_eos"), False, "sampling_params.ignore_eos"),
    (("sampling_params", "min_p"), 0.1, "sampling_params.min_p"),
    (("sampling_params", "temperature"), -1.0, "sampling_params.temperature"),
    (("sampling_params", "sampling_seed"), -1, "sampling_params.sampling_seed"),
]


@pytest.mark.parametrize(("path", "value", "field"), WRONG, ids=str)
def test_a_wrong_call_of_sglang_is_rejected_in_one_line_that_names_the_field(
    glm: RunningServer, path: tuple[Any, ...], value: Any, field: str
) -> None:
    for batch in (False, True):
        right = sglang_body(GREEDY[0])
        wrong = copy_json(sglang_body(GREEDY[0]), *path, value=value)
        if batch and (path == ("input_ids",) or path == ("image_data",) or path == ("text",)):
            continue
        status, response = post(glm, "/generate", join_bodies(right, wrong) if batch else wrong)
        assert status == 400
        message = response["error"]["message"]
        assert message.split(":")[0].endswith(field.split(".")[-1] if batch else field), message
        assert "\n" not in message
        assert len(message) < 500
    wait_until(lambda: glm.metric("lantern_images_running", model="tiny-glm-image") == 0)


def test_lists_of_different_lengths_and_too_many_images_are_rejected(glm: RunningServer) -> None:
    calls = [sglang_body(GREEDY[0])] * 11
    assert post(glm, "/generate", join_bodies(*calls))[1]["error"]["message"] == "n: found 11, expected at most 10"
    body = join_bodies(*calls[:2]) | {"sampling_params": calls[:1]}
    assert post(glm, "/generate", body)[0] == 400


def test_a_bundle_of_one_grid_rejects_sglang(tiny: RunningServer) -> None:
    status, response = post(tiny, "/generate", sglang_body(GREEDY[0]))
    assert (status, "does not draw a small grid" in response["error"]["message"]) == (400, True)


@pytest.mark.parametrize("name", ["tiny", "glm"])
def test_codes_are_those_of_the_pipeline_as_json_as_a_file_and_as_a_stream(
    request: pytest.FixtureRequest, name: str, tiny_pipe: Pipeline, glm_pipe: Pipeline
) -> None:
    server = request.getfixturevalue(name)
    pipe, prompt = (tiny_pipe, "red cube") if name == "tiny" else (glm_pipe, "a red fox")
    size = pipe.bundle.manifest.size()
    result = pipe(prompt, seed=5, num_images=2)
    grids = [codes[size.first_codes :].reshape(size.rows, size.columns).tolist() for codes in result.codes]
    firsts = [codes[: size.first_codes].tolist() for codes in result.codes]
    body = {"prompt": prompt, "seed": 5}
    status, response = post(server, CODES, {**body, "n": 2})
    assert (status, [image_data["codes"] for image_data in response["data"]]) == (200, grids)
    assert [[*chain(*image_data["first_codes"])] for image_data in response["data"]] == firsts
    assert (response["size"], response["lantern"]["seeds"]) == (size.name, [5, 6])
    headers = {"accept": "text/html, application/x-npz;q=1"}
    status, answer_headers, file = server.request("POST", CODES, json.dumps(body).encode(), JSON | headers)
    assert (status, answer_headers["content-type"]) == (200, "application/x-npz")
    with np.load(io.BytesIO(file)) as arrays:
        assert (arrays["codes"].tolist(), arrays["first_codes"].ravel().tolist()) == (grids[0], firsts[0])
        assert json.loads(str(arrays["recipe"]))["seed"] == "5"
    for change in ({"n": 2}, {"stream": True}):
        assert post(server, CODES, body | change, **headers)[0] == 400
    _, _, stream = server.request("POST", CODES, json.dumps({**body, "stream": True, "steps": True}).encode(), JSON)
    *steps, (kind, last) = parse_events(stream)
    assert (kind, last["codes"]) == ("image_codes.completed", grids[0])
    kinds = "".join(data["kinds"] for _, data in steps)
    assert len(kinds) == steps[-1][1]["first_codes"] + size.rows * size.columns == size.codes


def test_codes_reject_the_fields_of_images_and_images_are_rejected_where_there_are_codes(
    tiny: RunningServer, glm: RunningServer
) -> None:
    for field in ({"output_format": "png"}, {"partial_images": 1}, {"response_format": "url"}):
        status, response = post(tiny, CODES, {"prompt": "red cube", **field})
        assert (status, response["error"]["param"]) == (400, *field)
    status, response = post(glm, "/v1/images/generations", {"prompt": "a fox"})
    assert (status, "POST to /v1/images/codes" in response["error"]["message"]) == (400, True)
    (model,) = glm.get("/v1/models")[1]["data"]
    assert (model["lantern"]["images"], tiny.get("/v1/models")[1]["data"][0]["lantern"]["images"]) == (False, True)


def test_fifty_callers_of_both_endpoints_get_what_they_asked_for_and_those_who_leave_free_their_places(
    glm: RunningServer, glm_pipe: Pipeline
) -> None:
    expected = {
        seed: glm_pipe(**pipeline_arguments(GREEDY[1], seed=seed, temperature=1.0)).codes[0].tolist()
        for seed in range(5)
    }
    mismatches: list[Any] = []

    def request_codes(number: int) -> None:
        seed = number % 5
        if number % 2:
            _, response = post(glm, "/generate", sglang_body(GREEDY[1], seed))
            codes = response["output_ids"]
        else:
            body = {
                "prompt": GREEDY[1]["prompt"],
                "size": pipeline_arguments(GREEDY[1])["size"],
                "seed": seed,
                "temperature": 1.0,
            }
            _, response = post(glm, CODES, body)
            codes = [*chain(*response["data"][0]["first_codes"], *response["data"][0]["codes"])]
        if codes != expected[seed]:
            mismatches.append((number, response))

    def leave() -> None:
        body = json.dumps(join_bodies(*[sglang_body(GREEDY[0])] * 4)).encode()
        with glm.connect(format_head("/generate", "application/json", len(body)) + body):
            wait_until(lambda: glm.metric("lantern_images_running", model="tiny-glm-image") > 0)

    threads = [threading.Thread(target=request_codes, args=(number,)) for number in range(50)]
    threads += [threading.Thread(target=leave) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mismatches == []
    wait_until(lambda: glm.metric("lantern_images_running", model="tiny-glm-image") == 0)
    wait_until(lambda: glm.metric("lantern_images_waiting", model="tiny-glm-image") == 0)
    wait_until(lambda: sum(line["status"] == 499 for line in glm.request_lines()) == 3)


def test_keys_deadlines_and_sigterm_hold_for_sglang(
    start: Callable[..., RunningServer], glm_image_bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("sglang secret\n")
    arguments = [glm_image_bundle, "--threads", 1, "--batch", 1, "--api-key-file", tmp_path / "keys"]
    server = start(*arguments, "--deadline", 0.01)
    key = {"authorization": "Bearer secret"}
    assert post(server, "/generate", sglang_body(GREEDY[0]))[0] == 401
    assert post(server, "/generate", join_bodies(*[sglang_body(GREEDY[0])] * 8), **key)[0] in (429, 504)
    wait_until(lambda: server.request_lines() != [] and server.request_lines()[-1]["key"] == "sglang")
    server.stop()
    server = start(*arguments)
    responses: list[Any] = []
    request_thread = threading.Thread(
        target=lambda: responses.append(post(server, "/generate", sglang_body(GREEDY[0], top_k=1), **key))
    )
    request_thread.start()
    wait_until(lambda: server.metric("lantern_images_running", model="tiny-glm-image") > 0)
    assert server.stop() == 0
    request_thread.join()
    assert [(status, response["output_ids"]) for status, response in responses] == [(200, published_codes(GREEDY[0]))]
