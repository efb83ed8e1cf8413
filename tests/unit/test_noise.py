"""Random numbers of an image: they follow docs/seeds.md, never change, and are independent of each other."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2_contingency, kstest

from lantern_rt.runtime.noise import FORMAT, Noise

# From docs/seeds.md: seed, position, the first four 32-bit random numbers, and their Gumbel noise.
REFERENCE_VALUES = [
    (0, 0, [149215387, 4152464477, 2882710362, 161177097], [-1.211884, 3.389014, 0.919513, -1.188665]),
    (0, 1, [49592932, 1090160368, 1200139746, 2902407428], [-1.495452, -0.315627, -0.242951, 0.93674]),
    (1, 0, [1969390303, 3523876871, 1212587396, 1966945340], [0.24882, 1.620083, -0.234825, 0.247229]),
    (2**63 - 1, 255, [1764656498, 1154652547, 1436462862, 3914595258], [0.117109, -0.272805, -0.090992, 2.378042]),
    (2**64 - 1, 255, [1777942466, 2272472816, 2184299489, 3996863541], [0.125578, 0.451652, 0.391342, 2.632006]),
]


@pytest.mark.parametrize(("seed", "position", "words", "gumbel"), REFERENCE_VALUES)
def test_random_numbers_equal_the_values_in_the_documentation(
    seed: int, position: int, words: list[int], gumbel: list[float]
) -> None:
    assert compute_random_words(seed, position, 4) == words
    np.testing.assert_allclose(Noise(seed).gumbel(position, 1, 4), [gumbel], atol=1e-6)
    np.testing.assert_allclose(gumbel, -np.log(-np.log((np.array(words) + 0.5) / 2**32)), atol=1e-6)


def compute_random_words(seed: int, position: int, count: int) -> list[int]:
    """Return the first 32-bit random numbers of a position, computed as docs/seeds.md specifies."""
    numbers = [16 * code + position % 16 for code in range(count)]
    blocks = [compute_philox_block([1 + number // 8, position // 16, 0, 0], [seed, 0]) for number in numbers]
    return [
        block[number % 8 // 2] >> 32 * (number % 2) & 0xFFFFFFFF for block, number in zip(blocks, numbers, strict=True)
    ]


def compute_philox_block(counter: list[int], key: list[int]) -> list[int]:
    """Return four 64-bit numbers of Philox4x64-10 (Salmon et al. 2011)."""
    mask = 2**64 - 1
    for _ in range(10):
        first_product = 0xD2E7470EE14C6C93 * counter[0]
        second_product = 0xCA5A826395121157 * counter[2]
        counter = [
            (second_product >> 64) ^ counter[1] ^ key[0],
            second_product & mask,
            (first_product >> 64) ^ counter[3] ^ key[1],
            first_product & mask,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
    return counter


def test_the_noise_of_a_seed_is_the_same_as_in_earlier_versions() -> None:
    assert FORMAT == "philox4x64-gumbel-1"
    digest = hashlib.sha256(np.round(Noise(2026).gumbel(255, 1, 16384), 3).tobytes()).hexdigest()
    assert digest[:16] == "a78c2a90f7792d94"


def test_noise_does_not_depend_on_the_requested_amount() -> None:
    noise_of_few_codes = Noise(5)
    noise_of_many_codes = Noise(5)
    np.testing.assert_array_equal(noise_of_many_codes.gumbel(3, 1, 1024)[:, :7], noise_of_few_codes.gumbel(3, 1, 7))
    np.testing.assert_array_equal(noise_of_few_codes.gumbel(3, 1, 1024), noise_of_many_codes.gumbel(3, 1, 1024))
    together = Noise(5).gumbel(3, 40, 9)  # spans three groups of 16 positions
    np.testing.assert_array_equal(together, np.concatenate([Noise(5).gumbel(3 + i, 1, 9) for i in range(40)]))


def test_freed_noise_is_computed_again_with_the_same_values() -> None:
    noise = Noise(1)
    before = noise.gumbel(0, 40, 9)
    freed, needed = (weakref.ref(noise.gumbel(position, 16, 9).base) for position in (0, 32))
    noise.discard_noise_before(35)
    assert freed() is None  # no reference to the array is left
    assert needed() is not None
    np.testing.assert_array_equal(noise.gumbel(0, 40, 9), before)


def test_noise_is_finite_and_has_the_gumbel_distribution() -> None:
    values = np.concatenate([Noise(seed).gumbel(0, 16, 256).ravel() for seed in range(50)])
    assert np.isfinite(values).all()
    assert kstest(values.astype(np.float64), lambda x: np.exp(-np.exp(-x))).pvalue > 0.001


@pytest.mark.parametrize(
    ("make_first_numbers", "make_second_numbers"),
    [
        (lambda n: Noise(n).gumbel(0, 1, 4)[0], lambda n: Noise(n).gumbel(1, 1, 4)[0]),
        (lambda n: Noise(n).gumbel(0, 1, 4)[0], lambda n: Noise(n + 1).gumbel(0, 1, 4)[0]),
        (lambda n: Noise(n).gumbel(1, 1, 4)[0], lambda n: Noise(n + 1).gumbel(0, 1, 4)[0]),
        (lambda n: Noise(7).gumbel(n, 1, 4)[0], lambda n: Noise(7).gumbel(n + 1, 1, 4)[0]),
        (lambda n: Noise(n).gumbel(0, 1, 4)[0], lambda n: Noise(n).acceptance_rng(0).random(4)),
        (lambda n: Noise(n).gumbel(0, 1, 4)[0], lambda n: np.roll(Noise(n).gumbel(0, 1, 4)[0], 1)),
    ],
    ids=["positions", "seeds", "seed and position", "positions of one seed", "noise and acceptance", "codes"],
)
def test_random_numbers_of_positions_and_seeds_are_independent(
    make_first_numbers: Callable[[int], Any], make_second_numbers: Callable[[int], Any]
) -> None:
    """Check by a chi-squared test that the quartile of the first number does not predict the quartile of the second."""
    pairs = [
        np.stack([np.asarray(make_numbers(n), np.float64) for n in range(10_000)])
        for make_numbers in (make_first_numbers, make_second_numbers)
    ]
    quarters = [np.searchsorted(np.quantile(values, [0.25, 0.5, 0.75]), values) for values in pairs]
    table = np.zeros((4, 4))
    np.add.at(table, (quarters[0].ravel(), quarters[1].ravel()), 1)
    assert chi2_contingency(table).pvalue > 0.001


def test_a_positions_random_numbers_ignore_earlier_calls() -> None:
    noise = Noise(3)
    expected = Noise(3).acceptance_rng(5).random(6)
    noise.acceptance_rng(4).random(3)
    assert np.array_equal(noise.acceptance_rng(5).random(6), expected)
    assert np.array_equal(noise.acceptance_rng(5).random(6), expected)
    stream = np.random.Philox(key=3, counter=(1 << 128) + (5 << 64))  # docs/seeds.md
    assert np.array_equal(np.random.Generator(stream).random(6), expected)


def test_threads_may_prepare_noise_while_another_reads_it() -> None:
    noise = Noise(7)
    with ThreadPoolExecutor(4) as threads:
        for group in range(40):
            futures = [threads.submit(noise.prepare_noise_group, group + ahead, 700) for ahead in (3, 1, 2, 1)]
            values = noise.gumbel(16 * group + 3, 10, 700)
            np.testing.assert_array_equal(values, Noise(7).gumbel(16 * group + 3, 10, 700))
            noise.discard_noise_before(16 * group)
            for future in futures:
                future.result()
