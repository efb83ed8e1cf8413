"""Sampling on a device compared with sampling on the host: the same tokens and scores."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from guided_logits import guide

from lantern_rt.engines.device_engine import DeviceLogitsTensor
from lantern_rt.engines.ort.cache_pool import BoundForwardPass
from lantern_rt.engines.ort.device import OrtDevice
from lantern_rt.methods import Sampling
from lantern_rt.runtime.device import SamplingRequest
from lantern_rt.runtime.engine import Floats, Ints
from lantern_rt.runtime.noise import GROUP_SIZE, Noise
from lantern_rt.runtime.sampling import find_top_codes, process_logits

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
    {"temperature": 0.0, "top_k": 5},
]


@pytest.fixture(scope="module")
def device() -> OrtDevice:
    return OrtDevice("cpu")


def random_logits(rows: int = 4, nodes: int = 6, seed: int = 0) -> Floats:
    return 3 * np.random.default_rng(seed).standard_normal((rows, nodes, VOCABULARY), np.float32)


def upload(device: OrtDevice, logits: Floats) -> DeviceLogitsTensor:
    """Put logits on the device, as if a pass of up to 40 rows had computed them."""
    graph: Any = SimpleNamespace(bind_tensors=lambda values, capture_graph: None)
    tokens = np.zeros((40, logits.shape[1]), np.int32)
    return DeviceLogitsTensor(
        BoundForwardPass(graph, device, {"token_ids": tokens}, {"logits": device.upload(logits)}, False), "logits"
    )


def make_request(
    sampling: Sampling, noise: Noise | None, first: int = 0, start: int = 0, count: int = 5
) -> SamplingRequest:
    """Make a request whose unconditional nodes follow its conditional nodes by one.

    Args:
        sampling: sampling settings.
        noise: Gumbel noise of the image.
        first: first batch row.
        start: position of the first token.
        count: number of tokens.
    """
    num_rows = 1 + sampling.uses_guidance
    nodes = np.stack([np.arange(count) + row for row in range(num_rows)])
    scales = np.full(count, sampling.cfg_scale, np.float32)
    return SamplingRequest(slice(first, first + num_rows), nodes, sampling, noise, start + np.arange(count), scales)


class UploadedNoise(Noise):
    """Noise that records which groups are uploaded to the device."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.uploads: list[int] = []

    def gumbel(self, first: int, count: int, size: int) -> Floats:
        if count == GROUP_SIZE:
            self.uploads.append(first // GROUP_SIZE)
        return super().gumbel(first, count, size)


def sample_on_host(logits: Floats, request: SamplingRequest, count: int) -> tuple[Ints, Floats]:
    rows = np.arange(request.rows.start, request.rows.stop)[:, None]
    values = process_logits(guide(logits[rows, request.nodes], request.sampling), request.sampling)
    if request.noise is not None:
        noise = [request.noise.gumbel(int(position), 1, VOCABULARY)[0] for position in request.positions]
        values = values + np.stack(noise)
    return find_top_codes(values, count)


def assert_agree(samples: tuple[Ints, Floats], expected: tuple[Ints, Floats]) -> None:
    codes, scores = samples
    expected_codes, expected_scores = expected
    possible = np.isfinite(expected_scores)
    np.testing.assert_array_equal(np.isfinite(scores), possible)
    np.testing.assert_array_equal(codes[possible], expected_codes[possible])
    np.testing.assert_allclose(scores[possible], expected_scores[possible], atol=1e-4, rtol=0)


@pytest.mark.parametrize("count", [1, 10])
@pytest.mark.parametrize("noisy", [False, True], ids=["", "noisy"])
@pytest.mark.parametrize("cfg_scale", [1.0, 4.0], ids=["", "guided"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_device_samples_the_same_tokens_as_the_host(
    device: OrtDevice, filters: dict[str, Any], cfg_scale: float, noisy: bool, count: int
) -> None:
    sampling = Sampling(cfg_scale=cfg_scale, **filters)
    logits = random_logits()
    rows = upload(device, logits)
    assert rows.supports_sampling(sampling)
    noise = Noise(7) if noisy and not sampling.greedy else None
    request = make_request(sampling, noise, first=1, start=GROUP_SIZE - 2)
    (samples,) = rows.sample_top_codes([request], count)
    assert_agree(samples, sample_on_host(logits, request, count))


def test_a_top_p_that_no_sum_reaches_keeps_all_tokens(device: OrtDevice) -> None:
    """Use a top-p so close to one that a float32 sum of all probabilities may be smaller."""
    for seed in range(4):
        logits = random_logits(seed=seed)
        request = make_request(Sampling(top_p=1 - 2**-24), Noise(seed))
        (samples,) = upload(device, logits).sample_top_codes([request], 1)
        assert_agree(samples, sample_on_host(logits, request, 1))


def test_top_p_before_top_k_is_not_supported_on_the_device(device: OrtDevice) -> None:
    both = {"top_k": 5, "top_p": 0.5, "filter_order": "top-p, top-k"}
    rows = upload(device, random_logits())
    assert not rows.supports_sampling(Sampling(**both))
    assert rows.supports_sampling(Sampling(**both, temperature=0))
    assert rows.supports_sampling(Sampling(**{**both, "top_k": 0}))


def test_requests_with_different_settings_are_sampled_in_one_call(device: OrtDevice) -> None:
    logits = random_logits(rows=8, nodes=9)
    requests = []
    settings = [Sampling(), Sampling(cfg_scale=3.0), Sampling(temperature=0.7), Sampling(cfg_scale=2.0, top_k=9)]
    for i, sampling in enumerate(settings):
        requests.append(make_request(sampling, Noise(i), first=2 * i, start=20 * i, count=2 + 2 * i))
    for samples, request in zip(upload(device, logits).sample_top_codes(requests, 3), requests, strict=True):
        assert samples[0].shape == (len(request.positions), 3)
        assert_agree(samples, sample_on_host(logits, request, 3))


def test_filtered_tokens_have_no_score(device: OrtDevice) -> None:
    request = make_request(Sampling(top_k=3), Noise(1))
    ((_, scores),) = upload(device, random_logits()).sample_top_codes([request], 10)
    assert (np.isfinite(scores).sum(1) == 3).all()
    assert (scores[:, 3:] == -np.inf).all()


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinite_logits_show_in_the_scores(device: OrtDevice, filters: dict[str, Any], value: float) -> None:
    sampling = Sampling(cfg_scale=2.0, **filters)
    logits = random_logits()
    logits[0, 0, 5] = value  # padding nodes of a request refer to this node, too
    for noise in (None, Noise(1)):
        requests = [make_request(sampling, noise), make_request(sampling, noise, first=2)]
        (_, scores), (_, other_scores) = upload(device, logits).sample_top_codes(requests, 2)
        assert not np.isfinite(scores[:, 0]).all()
        assert np.isfinite(other_scores[:, 0]).all()  # the other request is not affected


def test_more_seeds_and_positions_than_the_noise_table_holds_are_sampled_correctly() -> None:
    device = OrtDevice("cpu")
    logits = random_logits(rows=2, nodes=70)
    rows = upload(device, logits)
    generator = np.random.default_rng(0)
    for count in (5, 40, 3, 70):  # with positions in up to 6 groups of each of up to 12 seeds
        seeds = generator.choice(1000, 12, replace=False).tolist()
        requests = [make_request(Sampling(), Noise(seed), i % 2, 11 * i, count) for i, seed in enumerate(seeds)]
        for samples, request in zip(rows.sample_top_codes(requests, 2), requests, strict=True):
            assert_agree(samples, sample_on_host(logits, request, 2))


def test_only_the_noise_that_is_needed_is_uploaded() -> None:
    rows = upload(OrtDevice("cpu"), random_logits())
    groups = [UploadedNoise(seed) for seed in range(80)]
    rows.sample_top_codes([make_request(Sampling(), groups[0], start=GROUP_SIZE + 1, count=4)], 1)
    assert groups[0].uploads == [1]
    for part in (groups[:40], groups[40:], groups[:40]):
        rows.sample_top_codes([make_request(Sampling(), noise, count=4) for noise in part], 1)
    assert [noise.uploads for noise in groups] == [[1, 0], *[[0]] * 79]  # the table holds all 80 groups


def test_threads_prepare_the_noise_of_the_next_positions_while_the_device_samples() -> None:
    prepared: Queue[tuple[int, int]] = Queue()

    class PreparedNoise(UploadedNoise):
        def prepare_noise_group(self, group: int, size: int) -> None:
            super().prepare_noise_group(group, size)
            prepared.put((self.seed, group))

    rows = upload(OrtDevice("cpu"), random_logits())
    noises = [PreparedNoise(seed) for seed in range(3)]
    for _ in range(2):  # nothing is computed twice
        rows.sample_top_codes([make_request(Sampling(), noise, count=4) for noise in noises], 1)
        assert [noise.uploads for noise in noises] == [[0]] * 3
    assert {prepared.get(timeout=60) for _ in noises} == {(seed, 1) for seed in range(3)}
    assert prepared.empty()
    ahead = make_request(Sampling(), noises[0], start=GROUP_SIZE, count=4)
    (samples,) = rows.sample_top_codes([ahead], 1)
    assert_agree(samples, sample_on_host(random_logits(), ahead, 1))


def test_evicted_noise_is_uploaded_again() -> None:
    device = OrtDevice("cpu")
    logits = random_logits(rows=1, nodes=4)
    rows = upload(device, logits)
    noises = [UploadedNoise(seed) for seed in range(80)]
    requests = [make_request(Sampling(), noise, start=GROUP_SIZE * noise.seed, count=2) for noise in noises]
    for request in [*requests, *requests[::3], *requests[::-1]]:
        (samples,) = rows.sample_top_codes([request], 1)
        assert_agree(samples, sample_on_host(logits, request, 1))
    for earlier, later in zip(
        requests[31::-1], requests[40:72], strict=True
    ):  # noise of the current call must not be evicted
        for samples, request in zip(rows.sample_top_codes([later, earlier], 1), (later, earlier), strict=True):
            assert_agree(samples, sample_on_host(logits, request, 1))
    assert max(len(noise.uploads) for noise in noises) > 1  # otherwise nothing was evicted


def test_several_threads_sample_the_same_tokens_as_alone() -> None:
    device = OrtDevice("cpu")
    logits = random_logits(rows=2, nodes=6)
    rows = upload(device, logits)

    def sample_and_compare(seed: int) -> None:
        noise = Noise(seed)
        sampling = Sampling(top_k=10 * (seed % 3))
        for start in range(0, 20 * GROUP_SIZE, GROUP_SIZE - 1):
            request = make_request(sampling, noise, first=seed % 2, start=start)
            (samples,) = rows.sample_top_codes([request], 3)
            assert_agree(samples, sample_on_host(logits, request, 3))

    with ThreadPoolExecutor(6) as threads:
        assert [*threads.map(sample_and_compare, range(12))] == [None] * 12


def test_logits_are_indexed_as_in_numpy(device: OrtDevice) -> None:
    logits = random_logits()
    rows = upload(device, logits)
    for key in ((1, 2), (slice(1, 3), slice(0, 2)), (np.arange(4), np.array([3, 0, 5, 1])), np.array([2, 0])):
        np.testing.assert_array_equal(rows[key], logits[key])
