"""Tokens, logits and pixels of the embedded `scenes` model in float32 on a device, compared with the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lantern_rt import Pipeline
from lantern_rt.engines.ort.device import OrtDevice
from lantern_rt.engines.ort.providers import PROVIDERS
from lantern_rt.engines.ort.session import GraphSession
from lantern_rt.runtime.engine import PassInput
from lantern_rt.runtime.noise import GROUP_SIZE

METHODS = [
    "ar",
    "sjd:window=3",
    "eagle:tree=chain-3",
    "eagle:tree=dynamic-8-4-2:drafter=eagle",
    "lantern++",
    "rows:window=1",
]
STEPS = 3  # steps of a generation that tests compare
RECORDED_STEPS = 9  # enough to record and replay forward passes with both output buffers


@pytest.fixture(scope="module")
def device_sessions() -> Iterator[list[GraphSession]]:
    sessions: list[GraphSession] = []
    initialize = GraphSession.__init__

    def open_graph(graph: GraphSession, *arguments: Any, **options: Any) -> None:
        initialize(graph, *arguments, **options)
        if graph.provider != "cpu":
            sessions.append(graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphSession, "__init__", open_graph)
        yield sessions


@pytest.fixture(scope="module")
def device_pipe(float_scenes_bundle: Path, device_sessions: list[GraphSession], provider: str) -> Pipeline:
    return Pipeline.from_bundle(float_scenes_bundle, provider=provider)


@pytest.fixture(scope="module")
def cpu_pipe(float_scenes_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(float_scenes_bundle, provider="cpu")


def generate_first_codes(pipe: Pipeline, method: str, count: int = STEPS, **options: float) -> list[list[int]]:
    steps = list(islice(pipe.stream("a red sphere on sand", seed=5, method=method, **options), count))
    return [codes.tolist() for codes in steps[-1].codes]


@pytest.mark.parametrize(
    ("method", "steps", "options"),
    [
        *((method, STEPS, {"temperature": 0}) for method in METHODS),
        *((method, STEPS, {}) for method in METHODS),
        *(("ar", STEPS, filters) for filters in ({"top_k": 100}, {"top_p": 0.9}, {"top_k": 200, "top_p": 0.95})),
        ("ar", RECORDED_STEPS, {}),
        ("eagle:tree=dynamic-8-4-2:drafter=eagle", RECORDED_STEPS, {}),
    ],
    ids=str,
)
def test_tokens_on_a_device_equal_the_tokens_on_the_cpu(
    device_pipe: Pipeline, cpu_pipe: Pipeline, method: str, steps: int, options: dict[str, float]
) -> None:
    expected = generate_first_codes(cpu_pipe, method, steps, **options)
    assert generate_first_codes(device_pipe, method, steps, **options) == expected


@pytest.mark.parametrize("providers_template", ["{},drafter=cpu", "cpu,drafter={}"])
def test_target_and_drafter_may_be_on_different_providers(
    float_scenes_bundle: Path, cpu_pipe: Pipeline, provider: str, providers_template: str
) -> None:
    providers = providers_template.format(provider)
    method = METHODS[3]
    device_pipe = Pipeline.from_bundle(float_scenes_bundle, provider=providers)
    assert device_pipe.engines.backend == f"onnxruntime-{providers}"
    assert generate_first_codes(device_pipe, method) == generate_first_codes(cpu_pipe, method)


def test_logits_and_states_agree_with_the_cpu_up_to_rounding(device_pipe: Pipeline, cpu_pipe: Pipeline) -> None:
    (prompt,) = device_pipe.prepare(device_pipe.check("a red cube on sand", method="ar")).prompts()
    embeds = np.stack([prompt.cond.embeds[:6], prompt.uncond.embeds[:6]])
    outputs = []
    for engine in (device_pipe.engines.target, cpu_pipe.engines.target):
        cache = engine.make_cache(2, 32)
        mask = np.zeros((2, 6, engine.past_columns(cache, 6) + 6), bool)
        mask[:, :, -6:] = np.tri(6)
        output = engine.run(PassInput(np.tile(np.arange(6), (2, 1)), mask, embeds=embeds), cache)
        outputs.append((output.logits[:, :6], output.hidden[:, :6]))
    for values, expected in zip(*outputs, strict=True):
        np.testing.assert_allclose(values, expected, atol=1e-4)


def test_decoded_images_agree_with_the_cpus_images(device_pipe: Pipeline, cpu_pipe: Pipeline) -> None:
    codes = np.random.default_rng(0).integers(0, device_pipe.bundle.manifest.codebook_size, (1, 256))
    np.testing.assert_allclose(
        device_pipe.engines.decode_images(codes), cpu_pipe.engines.decode_images(codes), atol=1e-4
    )


def test_vector_reads_gathers_and_noise_agree_with_numpy(provider: str) -> None:
    device = OrtDevice(provider)
    rng = np.random.default_rng(1)
    first_vectors, second_vectors = (
        rng.normal(size=(rows, columns, 8)).astype(np.float32) for rows, columns in ((3, 4), (2, 6))
    )
    values = device.upload(first_vectors), device.upload(second_vectors)
    indices = np.array([[0, 11], [5, 3]])
    np.testing.assert_array_equal(device.read_vectors(values[0], indices), first_vectors.reshape(-1, 8)[indices])
    gathered = device.empty((4, 6, 8), "float32")
    device.gather_rows([(values[0], np.array([2, 0])), (values[1], np.arange(2))], gathered, axis=0)
    expected = np.zeros((4, 6, 8), np.float32)
    expected[:2, :4] = first_vectors[[2, 0]]
    expected[2:] = second_vectors
    np.testing.assert_array_equal(gathered.numpy(), expected)
    table = device.zeros((3, GROUP_SIZE, 5, 8), "float32")
    noise = rng.normal(size=(GROUP_SIZE, 40)).astype(np.float32)
    device.write_noise(table, 1, noise)
    expected = np.zeros((3, GROUP_SIZE, 40), np.float32)
    expected[1] = noise
    np.testing.assert_array_equal(table.numpy().reshape(3, GROUP_SIZE, 40), expected)


@pytest.mark.parametrize("method", METHODS)
def test_the_first_tokens_of_an_image_do_not_depend_on_the_batch(device_pipe: Pipeline, method: str) -> None:
    """Compare only the first three tokens, because float32 rounding may change later tokens."""
    batch_steps = list(islice(device_pipe.stream("a red sphere on sand", seed=5, num_images=3, method=method), STEPS))
    assert batch_steps[-1].codes[0].tolist()[:STEPS] == generate_first_codes(device_pipe, method)[0][:STEPS]


@pytest.mark.parametrize("provider", ["webgpu"], indirect=True)
def test_no_node_of_the_decoder_graphs_runs_on_the_cpu(
    device_pipe: Pipeline, device_sessions: list[GraphSession]
) -> None:
    """Check all graphs except the image decoder, and even nodes that loading a bundle allows on the CPU."""
    sessions = [graph.session for graph in device_sessions if graph.path.stem != "vq_decoder"]
    name = PROVIDERS["webgpu"].execution_provider
    assignments = [assignment for session in sessions for assignment in session.get_provider_graph_assignment_info()]
    cpu_nodes = [
        node.op_type for assignment in assignments if assignment.ep_name != name for node in assignment.get_nodes()
    ]
    assert len(assignments) >= len(sessions) > 4
    assert cpu_nodes == []
