"""Test HTTP requests for codes at /v1/images/codes, and for codes of GLM-Image at /generate in SGLang's format."""

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
from running_server import JSON, RunningServer, format_head, wait_until

from lantern_rt import Pipeline

FOLDER = Path(__file__).parent.parent / "data/glm-image"
TRACES = {trace["name"]: trace for trace in json.loads((FOLDER / "traces.json").read_text()) if trace["name"] != "i2i"}
GREEDY_TRACES = [trace for trace in TRACES.values() if not trace["sample"]]
CODES_PATH = "/v1/images/codes"
GENERATE = "/generate"


@pytest.fixture(scope="module")
def glm_server(start_server: Callable[..., RunningServer], glm_image_bundle: Path) -> RunningServer:
    return start_server(glm_image_bundle, "--threads", 1, "--batch", 8)


@pytest.fixture(scope="module")
def glm_pipe(glm_image_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(glm_image_bundle, threads=1)


def make_sglang_body(trace: dict[str, Any], seed: int | None = 1, **sampling: Any) -> dict[str, Any]:
    """Return SGLang's request body for the image of a recorded trace; without a seed, the server chooses one."""
    grids = [[1, *trace["large_grid"]], [1, *trace["small_grid"]]]
    limit = {"max_new_tokens": trace["max_new_tokens"], "ignore_eos": True, "sampling_seed": seed}
    return {
        "input_ids": trace["prompt_ids"],
        "image_data": [{"image_grid_thw": grids}],
        "sampling_params": {"temperature": 1.0, **limit, **sampling},
    }


def make_batch_body(*bodies: dict[str, Any]) -> dict[str, Any]:
    """Return the request body that SGLang sends for the images of several bodies: each field is a list."""
    return {name: [body[name] for body in bodies] for name in bodies[0]}


def make_pipeline_arguments(trace: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the arguments of a `Pipeline` call for the image of a recorded trace."""
    return {"token_ids": trace["prompt_ids"], "size": f"{trace['width']}x{trace['height']}", **options}


def read_published_codes(trace: dict[str, Any]) -> list[int]:
    """Return the codes of a trace that was sampled greedily; the last generated id ends the image and is left out."""
    return trace["generated_ids"][: trace["max_new_tokens"] - 1]


def test_a_request_with_a_base64_source_image_returns_the_codes_of_the_pipeline(
    glm_server: RunningServer, glm_pipe: Pipeline
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (192, 320, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    assert len(file.getvalue()) > 32 << 10
    text = base64.b64encode(file.getvalue()).decode()
    expected = glm_pipe("a red fox", image=file.getvalue(), seed=4).codes[0].tolist()
    for image in (text, f"data:image/png;base64,{text}", base64.encodebytes(file.getvalue()).decode()):
        body = {"prompt": "a red fox", "seed": 4, "image": image}
        assert len(json.dumps(body)) > 64 << 10
        status, response = glm_server.post(body, CODES_PATH)
        assert (status, response["size"]) == (200, "160x96"), response
        (data,) = response["data"]
        assert data["first_codes"] == []
        assert np.ravel(data["codes"]).tolist() == expected
    for image in ("AAAA", "no base64", f"data:text/plain;base64,{text}", 7):
        status, response = glm_server.post(body | {"image": image}, CODES_PATH)
        assert (status, response["error"]["param"]) == (400, "image")
    for field in ("user", "mask", '"image": "'):  # only the image may be long
        assert glm_server.post(body | {field: text}, CODES_PATH)[0] == 413


def test_a_source_image_is_rejected_for_a_bundle_that_does_not_support_source_images(
    start_server: Callable[..., RunningServer],
) -> None:
    status, response = start_server("scenes").post({"prompt": "a red cube on sand", "image": "AAAA"}, CODES_PATH)
    assert (status, response["error"]["param"]) == (400, "image")
    assert "takes no source image" in response["error"]["message"]


def test_sglang_requests_for_one_image_and_a_batch_return_the_published_codes(glm_server: RunningServer) -> None:
    greedy = {"temperature": 1.0, "top_k": 1}
    status, response = glm_server.post(make_sglang_body(GREEDY_TRACES[0], **greedy), GENERATE)
    assert (status, response["output_ids"]) == (200, read_published_codes(GREEDY_TRACES[0]))
    assert response["meta_info"]["prompt_tokens"] == len(GREEDY_TRACES[0]["prompt_ids"])
    assert response["meta_info"]["completion_tokens"] == len(response["output_ids"])
    status, responses = glm_server.post(
        make_batch_body(*(make_sglang_body(trace, **greedy) for trace in GREEDY_TRACES)), GENERATE
    )
    assert (status, [image_response["output_ids"] for image_response in responses]) == (
        200,
        [read_published_codes(trace) for trace in GREEDY_TRACES],
    )
    assert glm_server.request("GET", "/health")[0] == 200


def test_an_sglang_seed_matches_the_pipeline_seed_and_a_null_seed_is_chosen_and_returned(
    glm_server: RunningServer, glm_pipe: Pipeline
) -> None:
    first_trace, second_trace, third_trace = GREEDY_TRACES[:3]
    bodies = (
        make_sglang_body(first_trace, 3),
        make_sglang_body(second_trace, 4, temperature=0.7, top_p=0.5),
        make_sglang_body(third_trace, None),
    )
    _, responses = glm_server.post(make_batch_body(*bodies), GENERATE)
    seed = responses[2]["meta_info"]["sampling_seed"]
    expected = [
        glm_pipe(**make_pipeline_arguments(first_trace, seed=3, temperature=1.0)),
        glm_pipe(**make_pipeline_arguments(second_trace, seed=4, temperature=0.7, top_p=0.5)),
        glm_pipe(**make_pipeline_arguments(third_trace, seed=seed, temperature=1.0)),
    ]
    assert [response["output_ids"] for response in responses] == [result.codes[0].tolist() for result in expected]
    _, second_response = glm_server.post(make_sglang_body(third_trace, None), GENERATE)
    assert second_response["meta_info"]["sampling_seed"] != seed


def copy_with_value(body: dict[str, Any], *path: Any, value: Any) -> dict[str, Any]:
    """Return a copy of a JSON object in which the value at `path` (keys and list indices) is replaced or added."""
    copy = json.loads(json.dumps(body))
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return copy


GRIDS = ("image_data", 0, "image_grid_thw")
# Path of the changed value in a valid body, the invalid value, and the field that the error names.
INVALID_CHANGES = [
    (("text",), "a fox", "text"),
    (("input_ids",), [], "input_ids"),
    (("input_ids",), [5, 6, 7], "input_ids"),  # does not end like the prompt template
    (("input_ids", 0), 1 << 40, "input_ids"),
    (("input_ids", 0), 5000, "input_ids"),  # not in the vocabulary
    (("input_ids", 0), -1, "input_ids"),
    (("input_ids",), "text", "input_ids"),
    (GRIDS, [[1, 9, 9], [1, 16, 16]], "image_grid_thw"),
    (GRIDS, [[1, 3, 5]], "image_grid_thw"),
    (GRIDS, [[1, 12, 20], [1, 3, 5]], "image_grid_thw"),  # small and large grid in the wrong order
    (("image_data",), [], "image_data"),
    (("sampling_params", "max_new_tokens"), 254, "max_new_tokens"),
    (("sampling_params", "ignore_eos"), False, "sampling_params.ignore_eos"),
    (("sampling_params", "frequency_penalty"), 0.1, "sampling_params.frequency_penalty"),
    (("sampling_params", "temperature"), -1.0, "sampling_params.temperature"),
    (("sampling_params", "sampling_seed"), -1, "sampling_params.sampling_seed"),
]


@pytest.mark.parametrize(("path", "value", "field"), INVALID_CHANGES, ids=str)
def test_an_invalid_sglang_request_is_rejected_with_one_line_that_names_the_field(
    glm_server: RunningServer, path: tuple[Any, ...], value: Any, field: str
) -> None:
    for is_batch in (False, True):
        valid_body = make_sglang_body(GREEDY_TRACES[0])
        invalid_body = copy_with_value(make_sglang_body(GREEDY_TRACES[0]), *path, value=value)
        if is_batch and (path == ("input_ids",) or path == ("image_data",) or path == ("text",)):
            continue  # a batch lists these fields of all images, so that the error differs
        body = make_batch_body(valid_body, invalid_body) if is_batch else invalid_body
        status, response = glm_server.post(body, GENERATE)
        assert status == 400
        message = response["error"]["message"]
        assert message.split(":")[0].endswith(field.split(".")[-1] if is_batch else field), message
        assert "\n" not in message
        assert len(message) < 500
    wait_until(lambda: glm_server.read_metric("lantern_images_running", model="tiny-glm-image") == 0)


def test_an_sglang_batch_with_too_many_images_or_unequal_lists_is_rejected(glm_server: RunningServer) -> None:
    bodies = [make_sglang_body(GREEDY_TRACES[0])] * 11
    _, response = glm_server.post(make_batch_body(*bodies), GENERATE)
    assert response["error"]["message"] == "n: found 11, expected at most 10"
    body = make_batch_body(*bodies[:2]) | {"sampling_params": bodies[:1]}
    assert glm_server.post(body, GENERATE)[0] == 400


def test_an_sglang_request_is_rejected_for_a_bundle_without_a_small_grid(tiny_server: RunningServer) -> None:
    status, response = tiny_server.post(make_sglang_body(GREEDY_TRACES[0]), GENERATE)
    assert (status, "does not generate a small grid" in response["error"]["message"]) == (400, True)


@pytest.mark.parametrize("name", ["tiny", "glm"])
def test_json_file_and_stream_responses_contain_the_codes_of_the_pipeline(
    request: pytest.FixtureRequest, name: str, tiny_pipe: Pipeline, glm_pipe: Pipeline
) -> None:
    server = request.getfixturevalue(f"{name}_server")
    pipe, prompt = (tiny_pipe, "red cube") if name == "tiny" else (glm_pipe, "a red fox")
    size = pipe.bundle.manifest.size()
    result = pipe(prompt, seed=5, num_images=2)
    grids = [codes[size.first_codes :].reshape(size.rows, size.columns).tolist() for codes in result.codes]
    small_grids = [codes[: size.first_codes].tolist() for codes in result.codes]
    body = {"prompt": prompt, "seed": 5}
    status, response = server.post({**body, "n": 2}, CODES_PATH)
    assert (status, [image_data["codes"] for image_data in response["data"]]) == (200, grids)
    assert [[*chain(*image_data["first_codes"])] for image_data in response["data"]] == small_grids
    assert (response["size"], response["lantern"]["seeds"]) == (size.name, [5, 6])
    for accept in ("application/x-npz;q=0", "application/x-npz; q=0.5, application/json"):
        assert "data" in server.post(body, CODES_PATH, accept=accept)[1]
    headers = {"accept": "text/html, Application/X-NPZ;Q=1, application/json;q=0.9"}
    status, response_headers, file = server.request("POST", CODES_PATH, json.dumps(body).encode(), JSON | headers)
    assert (status, response_headers["content-type"]) == (200, "application/x-npz")
    with np.load(io.BytesIO(file)) as arrays:
        assert (arrays["codes"].tolist(), arrays["first_codes"].ravel().tolist()) == (grids[0], small_grids[0])
        assert json.loads(str(arrays["recipe"]))["seed"] == "5"
    for extra_fields in ({"n": 2}, {"stream": True}):  # a file holds the codes of one image
        assert server.post(body | extra_fields, CODES_PATH, **headers)[0] == 400
    *steps, (event_type, last_event) = server.stream(body, CODES_PATH)
    assert (event_type, last_event["codes"]) == ("image_codes.completed", grids[0])
    kinds = "".join(data["kinds"] for _, data in steps)
    assert len(kinds) == steps[-1][1]["first_codes"] + size.rows * size.columns == size.codes


def test_code_requests_reject_image_fields_and_bundles_without_pixels_reject_image_requests(
    tiny_server: RunningServer, glm_server: RunningServer
) -> None:
    for field in ({"output_format": "png"}, {"partial_images": 1}, {"response_format": "url"}):
        status, response = tiny_server.post({"prompt": "red cube", **field}, CODES_PATH)
        assert (status, response["error"]["param"]) == (400, *field)
    status, response = glm_server.post({"prompt": "a fox"})
    assert (status, "POST to /v1/images/codes" in response["error"]["message"]) == (400, True)
    for server, makes_images in ((glm_server, False), (tiny_server, True)):
        (model,) = server.get("/v1/models")[1]["data"]
        assert model["lantern"]["images"] == makes_images


def test_fifty_concurrent_clients_get_the_right_codes_and_disconnected_clients_are_cancelled(
    glm_server: RunningServer, glm_pipe: Pipeline
) -> None:
    expected = {
        seed: glm_pipe(**make_pipeline_arguments(GREEDY_TRACES[1], seed=seed, temperature=1.0)).codes[0].tolist()
        for seed in range(5)
    }
    mismatches: list[Any] = []

    def request_codes(client_number: int) -> None:
        seed = client_number % 5
        if client_number % 2:
            _, response = glm_server.post(make_sglang_body(GREEDY_TRACES[1], seed), GENERATE)
            codes = response["output_ids"]
        else:
            size = make_pipeline_arguments(GREEDY_TRACES[1])["size"]
            body = {"prompt": GREEDY_TRACES[1]["prompt"], "size": size, "seed": seed, "temperature": 1.0}
            _, response = glm_server.post(body, CODES_PATH)
            codes = [*chain(*response["data"][0]["first_codes"], *response["data"][0]["codes"])]
        if codes != expected[seed]:
            mismatches.append((client_number, response))

    def disconnect_during_request() -> None:
        body = json.dumps(make_batch_body(*[make_sglang_body(GREEDY_TRACES[0])] * 4)).encode()
        with glm_server.connect(format_head(GENERATE, "application/json", len(body)) + body):
            wait_until(lambda: glm_server.read_metric("lantern_images_running", model="tiny-glm-image") > 0)

    threads = [threading.Thread(target=request_codes, args=(number,)) for number in range(50)]
    threads += [threading.Thread(target=disconnect_during_request) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mismatches == []
    wait_until(lambda: glm_server.read_metric("lantern_images_running", model="tiny-glm-image") == 0)
    wait_until(lambda: glm_server.read_metric("lantern_images_waiting", model="tiny-glm-image") == 0)
    wait_until(lambda: sum(line["status"] == 499 for line in glm_server.read_request_log()) == 3)


def test_api_keys_deadlines_and_sigterm_apply_to_sglang_requests(
    start_server: Callable[..., RunningServer], glm_image_bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("sglang secret\n")
    arguments = [glm_image_bundle, "--threads", 1, "--batch", 1, "--api-key-file", tmp_path / "keys"]
    server = start_server(*arguments, "--deadline", 0.01)
    key = {"authorization": "Bearer secret"}
    assert server.post(make_sglang_body(GREEDY_TRACES[0]), GENERATE)[0] == 401
    status, _ = server.post(make_batch_body(*[make_sglang_body(GREEDY_TRACES[0])] * 8), GENERATE, **key)
    assert status in (429, 504)  # busy, or the deadline of 10 ms was exceeded
    wait_until(lambda: server.read_request_log() != [] and server.read_request_log()[-1]["key"] == "sglang")
    server.stop()
    server = start_server(*arguments)
    responses: list[Any] = []
    request_thread = threading.Thread(
        target=lambda: responses.append(server.post(make_sglang_body(GREEDY_TRACES[0], top_k=1), GENERATE, **key))
    )
    request_thread.start()
    wait_until(lambda: server.read_metric("lantern_images_running", model="tiny-glm-image") > 0)
    assert server.stop() == 0
    request_thread.join()
    ((status, response),) = responses
    assert (status, response["output_ids"]) == (200, read_published_codes(GREEDY_TRACES[0]))
