"""Sampling on a device compared with sampling on the host: the same tokens and scores."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from guided_logits import make_sampler, mix_guided_logits

from lantern_rt.engines.device_engine import DeviceLogitsTensor
from lantern_rt.engines.ort.cache_pool import BoundForwardPass
from lantern_rt.engines.ort.device import OrtDevice
from lantern_rt.methods import Sampling
from lantern_rt.runtime.device import SamplingRequest
from lantern_rt.runtime.engine import Floats, Ints
from lantern_rt.runtime.noise import GROUP_SIZE, Noise
from lantern_rt.runtime.sampling import find_top_codes

VOCABULARY = 200
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 17},
    {"top_k": VOCABULARY + 1},
    {"top_p": 0.8},
    {"top_p": 1e-6},
    {"temperature": 1.4, "top_k": 50, "top_p": 0.9},
    {"top_k": 3, "top_p": 0.99},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 1.4, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 5, "top_p": 1e-6, "min_p": 1e-300},
    {"temperature": 0.0, "top_k": 5},
]


@pytest.fixture(scope="module")
def device() -> OrtDevice:
    return OrtDevice("cpu")


def make_random_logits(rows: int = 4, nodes: int = 6, seed: int = 0) -> Floats:
    return 3 * np.random.default_rng(seed).standard_normal((rows, nodes, VOCABULARY), np.float32)


def upload_logits(device: OrtDevice, logits: Floats) -> DeviceLogitsTensor:
    """Copy logits to the device, and return them as the output of a forward pass of at most 40 rows."""
    graph: Any = SimpleNamespace(bind_tensors=lambda values, capture_graph: None)
    tokens = np.zeros((40, logits.shape[1]), np.int32)
    return DeviceLogitsTensor(
        BoundForwardPass(graph, device, {"token_ids": tokens}, {"logits": device.upload(logits)}, False), "logits"
    )


def make_request(
    sampling: Sampling, noise: Noise | None, first_row: int = 0, first_position: int = 0, count: int = 5
) -> SamplingRequest:
    """Make a request for the tokens of the first nodes; unconditional logits are a node later."""
    num_rows = 1 + sampling.uses_guidance
    nodes = np.stack([np.arange(count) + row for row in range(num_rows)])
    codes = range(first_position, first_position + count)
    return make_sampler(sampling, 1 << 12).make_request(first_row + np.arange(num_rows), nodes, codes, noise)


class UploadRecordingNoise(Noise):
    """Gumbel noise that records which groups of positions are uploaded to the device."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.uploads: list[int] = []

    def gumbel(self, first: int, count: int, size: int) -> Floats:
        if count == GROUP_SIZE:
            self.uploads.append(first // GROUP_SIZE)
        return super().gumbel(first, count, size)


def sample_on_host(logits: Floats, request: SamplingRequest, count: int) -> tuple[Ints, Floats]:
    """Return the `count` best codes of each node and their scores, `[nodes, count]`, computed with NumPy."""
    guided = mix_guided_logits(logits[request.rows, request.nodes], request.sampling)
    values = make_sampler(request.sampling).process(guided)
    if request.noise is not None:
        noise = [request.noise.gumbel(int(position), 1, VOCABULARY)[0] for position in request.positions]
        values = values + np.stack(noise)
    return find_top_codes(values, count)


def assert_samples_agree(samples: tuple[Ints, Floats], expected: tuple[Ints, Floats]) -> None:
    codes, scores = samples
    expected_codes, expected_scores = expected
    is_finite = np.isfinite(expected_scores)
    np.testing.assert_array_equal(np.isfinite(scores), is_finite)
    np.testing.assert_array_equal(codes[is_finite], expected_codes[is_finite])
    np.testing.assert_allclose(scores[is_finite], expected_scores[is_finite], atol=1e-4, rtol=0)


@pytest.mark.parametrize("count", [1, 10])
@pytest.mark.parametrize("with_noise", [False, True], ids=["", "noisy"])
@pytest.mark.parametrize("cfg_scale", [1.0, 4.0], ids=["", "guided"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_device_samples_the_same_tokens_as_the_host(
    device: OrtDevice, filters: dict[str, Any], cfg_scale: float, with_noise: bool, count: int
) -> None:
    sampling = Sampling(cfg_scale=cfg_scale, **filters)
    logits = make_random_logits()
    device_logits = upload_logits(device, logits)
    assert device_logits.supports_sampling(sampling)
    noise = Noise(7) if with_noise and not sampling.greedy else None
    request = make_request(sampling, noise, first_row=1, first_position=GROUP_SIZE - 2)
    (samples,) = device_logits.sample_top_codes([request], count)
    assert_samples_agree(samples, sample_on_host(logits, request, count))


def test_a_top_p_above_the_rounded_sum_keeps_all_tokens(device: OrtDevice) -> None:
    """Use a top-p so close to 1 that a float32 sum of all probabilities may be smaller."""
    for seed in range(4):
        logits = make_random_logits(seed=seed)
        request = make_request(Sampling(top_p=1 - 2**-24), Noise(seed))
        (samples,) = upload_logits(device, logits).sample_top_codes([request], 1)
        assert_samples_agree(samples, sample_on_host(logits, request, 1))


def test_top_p_before_top_k_is_not_supported_on_the_device(device: OrtDevice) -> None:
    filters = {"top_k": 5, "top_p": 0.5, "filter_order": "top-p, top-k"}
    device_logits = upload_logits(device, make_random_logits())
    assert not device_logits.supports_sampling(Sampling(**filters))
    assert device_logits.supports_sampling(Sampling(**filters, temperature=0))
    assert device_logits.supports_sampling(Sampling(**{**filters, "top_k": 0}))


def test_different_settings_are_sampled_in_a_single_call(device: OrtDevice) -> None:
    logits = make_random_logits(rows=8, nodes=9)
    requests = []
    settings = [Sampling(), Sampling(cfg_scale=3.0), Sampling(temperature=0.7), Sampling(cfg_scale=2.0, top_k=9)]
    for i, sampling in enumerate(settings):
        requests.append(make_request(sampling, Noise(i), first_row=2 * i, first_position=20 * i, count=2 + 2 * i))
    for samples, request in zip(upload_logits(device, logits).sample_top_codes(requests, 3), requests, strict=True):
        assert samples[0].shape == (len(request.positions), 3)
        assert_samples_agree(samples, sample_on_host(logits, request, 3))


def test_tokens_that_top_k_removes_have_the_score_minus_infinity(device: OrtDevice) -> None:
    request = make_request(Sampling(top_k=3), Noise(1))
    ((_, scores),) = upload_logits(device, make_random_logits()).sample_top_codes([request], 10)
    assert (np.isfinite(scores).sum(1) == 3).all()
    assert (scores[:, 3:] == -np.inf).all()


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_makes_all_scores_of_its_node_non_finite(device: OrtDevice, filters: dict[str, Any], value: float) -> None:
    sampling = Sampling(cfg_scale=2.0, **filters)
    logits = make_random_logits()
    logits[0, 0, 5] = value  # the device pads requests with references to node 0
    for noise in (None, Noise(1)):
        requests = [make_request(sampling, noise), make_request(sampling, noise, first_row=2)]
        (_, scores), (_, other_scores) = upload_logits(device, logits).sample_top_codes(requests, 2)
        assert np.isfinite(scores).any(1).tolist() == [False] + [True] * (len(scores) - 1)
        assert np.isfinite(other_scores[:, 0]).all()


def test_seeds_beyond_the_noise_table_are_sampled_correctly() -> None:
    device = OrtDevice("cpu")
    logits = make_random_logits(rows=2, nodes=70)
    device_logits = upload_logits(device, logits)
    generator = np.random.default_rng(0)
    for count in (5, 40, 3, 70):  # positions are in up to 6 groups for each of up to 12 seeds
        seeds = generator.choice(1000, 12, replace=False).tolist()
        requests = [make_request(Sampling(), Noise(seed), i % 2, 11 * i, count) for i, seed in enumerate(seeds)]
        for samples, request in zip(device_logits.sample_top_codes(requests, 2), requests, strict=True):
            assert_samples_agree(samples, sample_on_host(logits, request, 2))


def test_only_noise_of_sampled_positions_is_uploaded() -> None:
    device_logits = upload_logits(OrtDevice("cpu"), make_random_logits())
    noises = [UploadRecordingNoise(seed) for seed in range(80)]
    device_logits.sample_top_codes([make_request(Sampling(), noises[0], first_position=GROUP_SIZE + 1, count=4)], 1)
    assert noises[0].uploads == [1]
    for batch_noise in (noises[:40], noises[40:], noises[:40]):
        device_logits.sample_top_codes([make_request(Sampling(), noise, count=4) for noise in batch_noise], 1)
    assert [noise.uploads for noise in noises] == [[1, 0], *[[0]] * 79]  # the table holds all 80 groups


def test_threads_compute_the_next_noise_while_the_device_samples() -> None:
    prepared_groups: Queue[tuple[int, int]] = Queue()

    class PreparationRecordingNoise(UploadRecordingNoise):
        """Gumbel noise that also records which groups of positions were computed in advance."""

        def prepare_noise_group(self, group: int, size: int) -> None:
            super().prepare_noise_group(group, size)
            prepared_groups.put((self.seed, group))

    device_logits = upload_logits(OrtDevice("cpu"), make_random_logits())
    noises = [PreparationRecordingNoise(seed) for seed in range(3)]
    for _ in range(2):  # the second call computes no noise
        device_logits.sample_top_codes([make_request(Sampling(), noise, count=4) for noise in noises], 1)
        assert [noise.uploads for noise in noises] == [[0]] * 3
    assert {prepared_groups.get(timeout=60) for _ in noises} == {(seed, 1) for seed in range(3)}
    assert prepared_groups.empty()
    request = make_request(Sampling(), noises[0], first_position=GROUP_SIZE, count=4)
    (samples,) = device_logits.sample_top_codes([request], 1)
    assert_samples_agree(samples, sample_on_host(make_random_logits(), request, 1))


def test_evicted_noise_is_uploaded_again() -> None:
    device = OrtDevice("cpu")
    logits = make_random_logits(rows=1, nodes=4)
    device_logits = upload_logits(device, logits)
    noises = [UploadRecordingNoise(seed) for seed in range(80)]
    requests = [make_request(Sampling(), noise, first_position=GROUP_SIZE * noise.seed, count=2) for noise in noises]
    for request in [*requests, *requests[::3], *requests[::-1]]:
        (samples,) = device_logits.sample_top_codes([request], 1)
        assert_samples_agree(samples, sample_on_host(logits, request, 1))
    for earlier, later in zip(
        requests[31::-1], requests[40:72], strict=True
    ):  # noise of the current call must not be evicted
        for samples, request in zip(device_logits.sample_top_codes([later, earlier], 1), (later, earlier), strict=True):
            assert_samples_agree(samples, sample_on_host(logits, request, 1))
    assert max(len(noise.uploads) for noise in noises) > 1  # otherwise nothing was evicted


def test_threads_that_share_a_device_sample_the_hosts_tokens() -> None:
    device = OrtDevice("cpu")
    logits = make_random_logits(rows=2, nodes=6)
    device_logits = upload_logits(device, logits)

    def sample_and_compare(seed: int) -> None:
        noise = Noise(seed)
        sampling = Sampling(top_k=10 * (seed % 3))
        for first_position in range(0, 20 * GROUP_SIZE, GROUP_SIZE - 1):
            request = make_request(sampling, noise, first_row=seed % 2, first_position=first_position)
            (samples,) = device_logits.sample_top_codes([request], 3)
            assert_samples_agree(samples, sample_on_host(logits, request, 3))

    with ThreadPoolExecutor(6) as threads:
        assert [*threads.map(sample_and_compare, range(12))] == [None] * 12


def test_logits_on_a_device_are_indexed_like_a_numpy_array(device: OrtDevice) -> None:
    logits = make_random_logits()
    device_logits = upload_logits(device, logits)
    for key in ((1, 2), (slice(1, 3), slice(0, 2)), (np.arange(4), np.array([3, 0, 5, 1])), np.array([2, 0])):
        np.testing.assert_array_equal(device_logits[key], logits[key])
