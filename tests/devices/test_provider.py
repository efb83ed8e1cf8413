"""`scenes` in float32 on a device: the CPU's tokens, logits and pixels."""

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
from lantern_rt.prepared import compute_prefixes
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
STEPS = 3
RECORDED_STEPS = 9  # enough that passes with both output buffers are recorded and replayed


@pytest.fixture(scope="module")
def opened() -> Iterator[list[GraphSession]]:
    """Return a list of the graphs that are opened on the device during the tests of this module."""
    sessions: list[GraphSession] = []
    start = GraphSession.__init__

    def open_graph(graph: GraphSession, *arguments: Any, **options: Any) -> None:
        start(graph, *arguments, **options)
        if graph.provider != "cpu":
            sessions.append(graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphSession, "__init__", open_graph)
        yield sessions


@pytest.fixture(scope="module")
def pipe(float_scenes_bundle: Path, opened: list[GraphSession], provider: str) -> Pipeline:
    return Pipeline.from_bundle(float_scenes_bundle, provider=provider)


@pytest.fixture(scope="module")
def on_cpu(float_scenes_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(float_scenes_bundle, provider="cpu")


def first_codes(pipe: Pipeline, method: str, count: int = STEPS, **options: float) -> list[list[int]]:
    steps = list(islice(pipe.stream("a red sphere on sand", seed=5, method=method, **options), count))
    return [codes.tolist() for codes in steps[-1].codes]


@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_are_the_cpus(pipe: Pipeline, on_cpu: Pipeline, method: str) -> None:
    assert first_codes(pipe, method, temperature=0) == first_codes(on_cpu, method, temperature=0)


@pytest.mark.parametrize("method", METHODS)
def test_sampled_tokens_are_the_cpus(pipe: Pipeline, on_cpu: Pipeline, method: str) -> None:
    assert first_codes(pipe, method) == first_codes(on_cpu, method)


@pytest.mark.parametrize("method", ["ar", "eagle:tree=dynamic-8-4-2:drafter=eagle"])
def test_replayed_passes_generate_the_cpus_tokens(pipe: Pipeline, on_cpu: Pipeline, method: str) -> None:
    assert first_codes(pipe, method, RECORDED_STEPS) == first_codes(on_cpu, method, RECORDED_STEPS)


@pytest.mark.parametrize("form", ["{},drafter=cpu", "cpu,drafter={}"])
def test_a_drafter_on_another_provider_generates_the_same_tokens(
    float_scenes_bundle: Path, on_cpu: Pipeline, provider: str, form: str
) -> None:
    providers = form.format(provider)
    method = METHODS[3]
    pipe = Pipeline.from_bundle(float_scenes_bundle, provider=providers)
    assert pipe.engines.backend == f"onnxruntime-{providers}"
    assert first_codes(pipe, method) == first_codes(on_cpu, method)


@pytest.mark.parametrize("filters", [{"top_k": 100}, {"top_p": 0.9}, {"top_k": 200, "top_p": 0.95}], ids=str)
def test_filtered_samples_are_the_cpus(pipe: Pipeline, on_cpu: Pipeline, filters: dict[str, float]) -> None:
    assert first_codes(pipe, "ar", **filters) == first_codes(on_cpu, "ar", **filters)


def test_logits_and_hidden_states_are_the_cpus_up_to_rounding(pipe: Pipeline, on_cpu: Pipeline) -> None:
    (prompt,) = compute_prefixes(pipe.bundle, pipe.engines, pipe.check("a red cube on sand", method="ar").images)
    embeds = np.stack([prompt.cond.embeds[:6], prompt.uncond.embeds[:6]])
    outputs = []
    for engine in (pipe.engines.target, on_cpu.engines.target):
        cache = engine.new_cache(2, 32)
        mask = np.zeros((2, 6, engine.padded_past_length(cache, 6) + 6), bool)
        mask[:, :, -6:] = np.tri(6)
        output = engine.run(PassInput(np.tile(np.arange(6), (2, 1)), mask, embeds=embeds), cache)
        outputs.append((output.logits[:, :6], output.hidden[:, :6]))
    for values, expected in zip(*outputs, strict=True):
        np.testing.assert_allclose(values, expected, atol=1e-4)


def test_images_are_the_cpus(pipe: Pipeline, on_cpu: Pipeline) -> None:
    codes = np.random.default_rng(0).integers(0, pipe.bundle.manifest.codebook_size, (1, 256))
    np.testing.assert_allclose(pipe.engines.decode_images(codes), on_cpu.engines.decode_images(codes), atol=1e-4)


def test_reading_gathering_and_noise_tables_agree_with_numpy(provider: str) -> None:
    device = OrtDevice(provider)
    rng = np.random.default_rng(1)
    first, second = (rng.normal(size=(rows, columns, 8)).astype(np.float32) for rows, columns in ((3, 4), (2, 6)))
    values = device.upload(first), device.upload(second)
    indices = np.array([[0, 11], [5, 3]])
    np.testing.assert_array_equal(device.read_vectors(values[0], indices), first.reshape(-1, 8)[indices])
    joined = device.empty((4, 6, 8), "float32")
    device.gather_rows([(values[0], np.array([2, 0])), (values[1], np.arange(2))], joined, axis=0)
    expected = np.zeros((4, 6, 8), np.float32)
    expected[:2, :4] = first[[2, 0]]
    expected[2:] = second
    np.testing.assert_array_equal(joined.numpy(), expected)
    table = device.zeros((3, GROUP_SIZE, 5, 8), "float32")
    noise = rng.normal(size=(GROUP_SIZE, 40)).astype(np.float32)
    device.write_noise(table, 1, noise)
    expected = np.zeros((3, GROUP_SIZE, 40), np.float32)
    expected[1] = noise
    np.testing.assert_array_equal(table.numpy().reshape(3, GROUP_SIZE, 40), expected)


@pytest.mark.parametrize("method", METHODS)
def test_images_do_not_depend_on_the_batch(pipe: Pipeline, method: str) -> None:
    """Compare only the first tokens, as later ones may differ by float32 rounding."""
    together = list(islice(pipe.stream("a red sphere on sand", seed=5, num_images=3, method=method), STEPS))
    assert together[-1].codes[0].tolist()[:STEPS] == first_codes(pipe, method)[0][:STEPS]


@pytest.mark.parametrize("provider", ["webgpu"], indirect=True)
def test_no_node_runs_on_the_cpu(pipe: Pipeline, opened: list[GraphSession]) -> None:
    """Check all graphs but the image decoder, including nodes that loading would tolerate on the CPU."""
    sessions = [graph.session for graph in opened if graph.path.stem != "vq_decoder"]
    name = PROVIDERS["webgpu"].execution_provider
    parts = [part for session in sessions for part in session.get_provider_graph_assignment_info()]
    cpu_nodes = [node.op_type for part in parts if part.ep_name != name for node in part.get_nodes()]
    assert len(parts) >= len(sessions) > 4
    assert cpu_nodes == []
