"""The random numbers of an image: specified, never to change, independent of one another."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from scipy.stats import chi2_contingency, kstest

from lantern_rt.runtime.noise import FORMAT, Noise

VECTORS = [  # docs/sampling.md: seed, position, the first four 32-bit numbers, the noise made of them
    (0, 0, [149215387, 49592932, 2628306354, 1037445899], [-1.211884, -1.495452, 0.711099, -0.351137]),
    (0, 1, [4162560622, 909929812, 1038135326, 925762249], [3.463705, -0.439436, -0.350669, -0.428258]),
    (1, 0, [1969390303, 1303814779, 3133017647, 3645176323], [0.248820, -0.175758, 1.153764, 1.807650]),
    (2**63 - 1, 255, [256856906, 768598949, 434228745, 3560579991], [-1.035559, -0.542690, -0.829262, 1.673867]),
]


def test_the_format_has_a_name_that_pictures_carry() -> None:
    assert FORMAT == "philox4x64-gumbel-1"


@pytest.mark.parametrize(("seed", "position", "words", "gumbel"), VECTORS)
def test_the_numbers_are_those_of_the_specification(
    seed: int, position: int, words: list[int], gumbel: list[float]
) -> None:
    block = philox(seed, position)
    assert [block[0] & 0xFFFFFFFF, block[0] >> 32, block[1] & 0xFFFFFFFF, block[1] >> 32] == words
    np.testing.assert_allclose(Noise(seed).gumbel(position, 4), gumbel, atol=1e-6)
    np.testing.assert_allclose(gumbel, -np.log(-np.log((np.array(words) + 0.5) / 2**32)), atol=1e-6)


def philox(seed: int, position: int) -> list[int]:
    """The first block of Philox4x64-10 (Salmon et al. 2011) with key (seed, 0) and counter (1, position, 0, 0)."""
    counter, key, mask = [1, position, 0, 0], [seed, 0], 2**64 - 1
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
        counter = [
            (second >> 64) ^ counter[1] ^ key[0],
            second & mask,
            (first >> 64) ^ counter[3] ^ key[1],
            first & mask,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
    return counter


def test_noise_of_a_whole_vocabulary_never_changes() -> None:
    digest = hashlib.sha256(np.round(Noise(2026).gumbel(255, 16384), 3).tobytes()).hexdigest()
    assert digest[:16] == "1366ef2594904479"


def test_more_codes_leave_the_noise_of_the_first_ones_as_it_is() -> None:
    few, many = Noise(5), Noise(5)
    np.testing.assert_array_equal(many.gumbel(3, 1024)[:7], few.gumbel(3, 7))
    np.testing.assert_array_equal(few.gumbel(3, 1024), many.gumbel(3, 1024))


def test_what_is_forgotten_comes_back_the_same() -> None:
    noise = Noise(1)
    before = [noise.gumbel(position, 9) for position in range(4)]
    noise.forget(3)
    for position in (0, 3):
        np.testing.assert_array_equal(noise.gumbel(position, 9), before[position])


def test_noise_is_finite_and_gumbel_distributed() -> None:
    values = np.concatenate([Noise(seed).gumbel(0, 4096) for seed in range(50)])
    assert np.isfinite(values).all()
    assert kstest(values.astype(np.float64), lambda x: np.exp(-np.exp(-x))).pvalue > 0.001


def test_the_largest_seed_has_noise_of_its_own() -> None:
    assert not np.array_equal(Noise(2**64 - 1).gumbel(0, 8), Noise(0).gumbel(0, 8))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda n: Noise(n).gumbel(0, 4), lambda n: Noise(n).gumbel(1, 4)),
        (lambda n: Noise(n).gumbel(0, 4), lambda n: Noise(n + 1).gumbel(0, 4)),
        (lambda n: Noise(n).gumbel(1, 4), lambda n: Noise(n + 1).gumbel(0, 4)),
        (lambda n: Noise(7).gumbel(n, 4), lambda n: Noise(7).gumbel(n + 1, 4)),
        (lambda n: Noise(n).gumbel(0, 4), lambda n: Noise(n).decisions(0).random(4)),
        (lambda n: Noise(n).gumbel(0, 4), lambda n: np.roll(Noise(n).gumbel(0, 4), 1)),
    ],
    ids=["positions", "seeds", "seed and position", "positions of one seed", "decisions", "codes"],
)
def test_numbers_of_different_positions_seeds_and_uses_are_independent(one: object, other: object) -> None:
    """Quarters of each against quarters of the other: 16 equal cells."""
    pairs = [np.stack([np.asarray(make(n), np.float64) for n in range(10_000)]) for make in (one, other)]  # type: ignore[operator]
    quarters = [np.searchsorted(np.quantile(values, [0.25, 0.5, 0.75]), values) for values in pairs]
    table = np.zeros((4, 4))
    np.add.at(table, (quarters[0].ravel(), quarters[1].ravel()), 1)
    assert chi2_contingency(table).pvalue > 0.001
