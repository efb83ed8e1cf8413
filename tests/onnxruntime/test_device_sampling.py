"""Codes drawn where the logits are, against the runtime's own sampling: the same codes and scores."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from guided_logits import guide

from lantern_rt.engines.device_engine import LogitRows
from lantern_rt.engines.ort.cache_pool import BoundPass
from lantern_rt.engines.ort.device import Device
from lantern_rt.methods import Sampling
from lantern_rt.runtime.device import SampleRequest
from lantern_rt.runtime.engine import Floats, Ints
from lantern_rt.runtime.noise import GROUP_SIZE, Noise
from lantern_rt.runtime.sampling import best_codes, process_logits

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
def device() -> Device:
    return Device("cpu")


def logits_of(rows: int = 4, nodes: int = 6, seed: int = 0) -> Floats:
    return 3 * np.random.default_rng(seed).standard_normal((rows, nodes, VOCABULARY), np.float32)


def on(device: Device, logits: Floats) -> LogitRows:
    """Logits of a pass that has been run, which may be for many at once."""
    graph: Any = SimpleNamespace(bind=lambda values, record: None)
    tokens = np.zeros((40, logits.shape[1]), np.int32)
    return LogitRows(BoundPass(graph, device, {"token_ids": tokens}, {"logits": device.put(logits)}, False), "logits")


def asking(sampling: Sampling, noise: Noise | None, first: int = 0, start: int = 0, count: int = 5) -> SampleRequest:
    """Someone whose rows are `first` and on, at other nodes of the unconditional row than of the conditional one."""
    sides = 1 + sampling.guided
    nodes = np.stack([np.arange(count) + side for side in range(sides)])
    scales = np.full(count, sampling.cfg_scale, np.float32)
    return SampleRequest(slice(first, first + sides), nodes, sampling, noise, start + np.arange(count), scales)


class UploadedNoise(Noise):
    """Noise that lists the groups brought to the device."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.uploads: list[int] = []

    def gumbel(self, first: int, count: int, size: int) -> Floats:
        if count == GROUP_SIZE:
            self.uploads.append(first // GROUP_SIZE)
        return super().gumbel(first, count, size)


def on_host(logits: Floats, asked: SampleRequest, most: int) -> tuple[Ints, Floats]:
    rows = np.arange(asked.rows.start, asked.rows.stop)[:, None]
    values = process_logits(guide(logits[rows, asked.nodes], asked.sampling), asked.sampling)
    if asked.noise is not None:
        noise = [asked.noise.gumbel(int(position), 1, VOCABULARY)[0] for position in asked.positions]
        values = values + np.stack(noise)
    return best_codes(values, most)


def agree(found: tuple[Ints, Floats], expected: tuple[Ints, Floats]) -> None:
    (codes, scores) = found
    (own, wanted) = expected
    possible = np.isfinite(wanted)
    np.testing.assert_array_equal(np.isfinite(scores), possible)
    np.testing.assert_array_equal(codes[possible], own[possible])
    np.testing.assert_allclose(scores[possible], wanted[possible], atol=1e-4, rtol=0)


@pytest.mark.parametrize("most", [1, 10])
@pytest.mark.parametrize("noisy", [False, True], ids=["", "noisy"])
@pytest.mark.parametrize("cfg_scale", [1.0, 4.0], ids=["", "guided"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_device_draws_what_the_host_draws(
    device: Device, filters: dict[str, Any], cfg_scale: float, noisy: bool, most: int
) -> None:
    sampling = Sampling(cfg_scale=cfg_scale, **filters)
    logits = logits_of()
    rows = on(device, logits)
    assert rows.can_sample(sampling)
    asked = asking(sampling, Noise(7) if noisy and not sampling.greedy else None, first=1, start=GROUP_SIZE - 2)
    (found,) = rows.best_codes([asked], most)
    agree(found, on_host(logits, asked, most))


def test_a_bound_that_no_sum_reaches_keeps_all(device: Device) -> None:
    """Sums of float32 may end below a top-p that is hardly less than one."""
    for seed in range(4):
        logits = logits_of(seed=seed)
        asked = asking(Sampling(top_p=1 - 2**-24), Noise(seed))
        (found,) = on(device, logits).best_codes([asked], 1)
        agree(found, on_host(logits, asked, 1))


def test_top_p_before_top_k_is_left_to_the_host(device: Device) -> None:
    both = {"top_k": 5, "top_p": 0.5, "filter_order": "top-p, top-k"}
    rows = on(device, logits_of())
    assert not rows.can_sample(Sampling(**both))
    assert rows.can_sample(Sampling(**both, temperature=0))
    assert rows.can_sample(Sampling(**{**both, "top_k": 0}))


def test_many_with_settings_of_their_own_are_drawn_together(device: Device) -> None:
    logits = logits_of(rows=8, nodes=9)
    asked = []
    settings = [Sampling(), Sampling(cfg_scale=3.0), Sampling(temperature=0.7), Sampling(cfg_scale=2.0, top_k=9)]
    for i, sampling in enumerate(settings):
        asked.append(asking(sampling, Noise(i), first=2 * i, start=20 * i, count=2 + 2 * i))
    for found, one in zip(on(device, logits).best_codes(asked, 3), asked, strict=True):
        assert found[0].shape == (len(one.positions), 3)
        agree(found, on_host(logits, one, 3))


def test_a_filter_that_keeps_few_gives_no_score_to_the_others(device: Device) -> None:
    asked = asking(Sampling(top_k=3), Noise(1))
    ((_, scores),) = on(device, logits_of()).best_codes([asked], 10)
    assert (np.isfinite(scores).sum(1) == 3).all()
    assert (scores[:, 3:] == -np.inf).all()


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_refused(device: Device, filters: dict[str, Any], value: float) -> None:
    sampling = Sampling(cfg_scale=2.0, **filters)
    logits = logits_of()
    logits[0, 0, 5] = value  # where nodes that only fill up a row point to, too
    for noise in (None, Noise(1)):
        asked = [asking(sampling, noise), asking(sampling, noise, first=2)]
        (_, scores), (_, others) = on(device, logits).best_codes(asked, 2)
        assert not np.isfinite(scores[:, 0]).all()
        assert np.isfinite(others[:, 0]).all()  # these may go on


def test_more_seeds_and_positions_than_the_noise_table_has_places_are_drawn_right() -> None:
    device = Device("cpu")
    logits = logits_of(rows=2, nodes=70)
    rows = on(device, logits)
    generator = np.random.default_rng(0)
    for count in (5, 40, 3, 70):  # with positions in up to 6 groups of each of up to 12 seeds
        seeds = generator.choice(1000, 12, replace=False).tolist()
        asked = [asking(Sampling(), Noise(seed), i % 2, 11 * i, count) for i, seed in enumerate(seeds)]
        for found, one in zip(rows.best_codes(asked, 2), asked, strict=True):
            agree(found, on_host(logits, one, 2))


def test_only_the_noise_that_is_read_is_brought_to_the_device() -> None:
    rows = on(Device("cpu"), logits_of())
    groups = [UploadedNoise(seed) for seed in range(80)]
    rows.best_codes([asking(Sampling(), groups[0], start=GROUP_SIZE + 1, count=4)], 1)
    assert groups[0].uploads == [1]
    for part in (groups[:40], groups[40:], groups[:40]):
        rows.best_codes([asking(Sampling(), noise, count=4) for noise in part], 1)
    assert [noise.uploads for noise in groups] == [[1, 0], *[[0]] * 79]  # the first 40 left room for the others


def test_threads_make_the_noise_of_the_next_positions_while_the_device_samples() -> None:
    prepared: Queue[tuple[int, int]] = Queue()

    class Noted(UploadedNoise):
        def prepare_group(self, group: int, size: int) -> None:
            super().prepare_group(group, size)
            prepared.put((self.seed, group))

    rows = on(Device("cpu"), logits_of())
    noises = [Noted(seed) for seed in range(3)]
    for _ in range(2):  # nothing is made twice
        rows.best_codes([asking(Sampling(), noise, count=4) for noise in noises], 1)
        assert [noise.uploads for noise in noises] == [[0]] * 3
    assert {prepared.get(timeout=60) for _ in noises} == {(seed, 1) for seed in range(3)}
    assert prepared.empty()
    ahead = asking(Sampling(), noises[0], start=GROUP_SIZE, count=4)
    (found,) = rows.best_codes([ahead], 1)
    agree(found, on_host(logits_of(), ahead, 1))


def test_noise_that_has_made_room_for_other_comes_back() -> None:
    device = Device("cpu")
    logits = logits_of(rows=1, nodes=4)
    rows = on(device, logits)
    noises = [UploadedNoise(seed) for seed in range(80)]
    asked = [asking(Sampling(), noise, start=GROUP_SIZE * noise.seed, count=2) for noise in noises]
    for one in [*asked, *asked[::3], *asked[::-1]]:
        (found,) = rows.best_codes([one], 1)
        agree(found, on_host(logits, one, 1))
    for old, new in zip(asked[31::-1], asked[40:72], strict=True):  # the one used longest ago must not make room
        for found, one in zip(rows.best_codes([new, old], 1), (new, old), strict=True):
            agree(found, on_host(logits, one, 1))
    assert max(len(noise.uploads) for noise in noises) > 1  # or nothing had to make room


def test_several_threads_draw_at_once_what_each_draws_alone() -> None:
    device = Device("cpu")
    logits = logits_of(rows=2, nodes=6)
    rows = on(device, logits)

    def draw(seed: int) -> None:
        noise = Noise(seed)
        sampling = Sampling(top_k=10 * (seed % 3))
        for start in range(0, 20 * GROUP_SIZE, GROUP_SIZE - 1):
            asked = asking(sampling, noise, first=seed % 2, start=start)
            (found,) = rows.best_codes([asked], 3)
            agree(found, on_host(logits, asked, 3))

    with ThreadPoolExecutor(6) as threads:
        assert [*threads.map(draw, range(12))] == [None] * 12


def test_logits_are_read_as_numpy_would_index_them(device: Device) -> None:
    logits = logits_of()
    rows = on(device, logits)
    for key in ((1, 2), (slice(1, 3), slice(0, 2)), (np.arange(4), np.array([3, 0, 5, 1])), np.array([2, 0])):
        np.testing.assert_array_equal(rows[key], logits[key])
