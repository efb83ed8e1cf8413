"""Random weights of checkpoints in `tests/data`, which this module computes because git does not store them.

PyTorch's generator sampled the weights from seeds. This module repeats the computation in NumPy, rounded after every
operation as PyTorch 2.13 rounds on x86 with AVX2 (`avx_mathfun.h`), so that every processor computes the same bits.

`drawn-weights` has each checkpoint file without these weights, and `recipe.json` describes how to insert them:
`streams`: lists of steps. A step is a seed, or `[count, mean, factor, fan_in]` for `count` numbers
    `mean + factor * normal / sqrt(fan_in)`.
`files`: stream, dtype, SHA-256 of the complete file, and `places` `[offset, first, count]`: numbers `first` to
    `first + count` of the stream belong at byte `offset`.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).parent / "data"
DRAWN_WEIGHTS = DATA / "drawn-weights"
Floats = NDArray[np.float32]
LOG_COEFFICIENTS = (
    7.0376836292e-2,
    -1.151461031e-1,
    1.167699874e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
)
LOG_COEFFICIENTS += (2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)
COSINE_COEFFICIENTS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
SINE_COEFFICIENTS = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
MINUS_QUARTER_PI = (
    -0.78515625,
    -2.4187564849853515625e-4,
    -3.77489497744594108e-8,
)  # their sum is -pi / 4 to more digits than a float32 holds


def write_checkpoints() -> None:
    """Write the checkpoint files that are missing or have a wrong SHA-256."""
    recipe = json.loads((DRAWN_WEIGHTS / "recipe.json").read_text())
    streams: dict[str, Floats] = {}
    for name, file in recipe["files"].items():
        path = DATA / name
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == file["sha256"]:
            continue
        stream = file["stream"]
        if stream not in streams:
            streams[stream] = _sample_weights(recipe["streams"][stream])
        data = np.frombuffer(bytearray(lzma.decompress((DRAWN_WEIGHTS / f"{name}.xz").read_bytes())), np.uint8)
        _insert_numbers(data, _convert_to_dtype(streams[stream], file["dtype"]), file["places"])
        assert hashlib.sha256(data).hexdigest() == file["sha256"], f"{name}: SHA-256 differs from recipe.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_bytes(data)
        partial.replace(path)


def _insert_numbers(data: NDArray[np.uint8], numbers: NDArray[Any], places: list[tuple[int, int, int]]) -> None:
    """Insert numbers into the bytes of a checkpoint file, at the `places` of `recipe.json`."""
    width = numbers.itemsize
    numbers = numbers.view(np.uint8)
    for offset, first, count in places:
        # A stored byte is the XOR of a byte of the checkpoint and a byte of the numbers.
        data[offset : offset + count * width] ^= numbers[first * width : (first + count) * width]


def _convert_to_dtype(numbers: Floats, dtype: str) -> NDArray[Any]:
    """Round numbers to a dtype; return bfloat16 numbers as uint16, because NumPy has no bfloat16."""
    if dtype != "bfloat16":
        return numbers.astype(dtype)
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _sample_weights(steps: list[Any]) -> Floats:
    """Sample all numbers of a stream of `recipe.json`."""
    numbers = []
    for step in steps:
        if isinstance(step, int):
            generator = TorchGenerator(step)
            continue
        count, mean, factor, fan_in = step
        numbers.append(
            generator.sample_normals(count) * np.float32(factor) / np.float32(math.sqrt(fan_in)) + np.float32(mean)
        )
    return np.concatenate(numbers)


class TorchGenerator:
    """NumPy implementation of PyTorch's random number generator for the CPU."""

    def __init__(self, seed: int) -> None:
        self.bits = np.random.RandomState(seed)  # the Mersenne Twister of PyTorch, with the same seeding
        self.spare_normal: float | None = None  # Box-Muller makes pairs: the number that the next call returns

    def sample_normals(self, count: int) -> Floats:
        if count < 16:
            return np.array([self._sample_normal_in_double() for _ in range(count)], np.float32)
        uniform = self._sample_uniforms(count)
        end = count - count % 16
        normals = np.concatenate([_apply_box_muller(uniform[:end]), uniform[end:]])
        if end < count:
            normals[-16:] = _apply_box_muller(self._sample_uniforms(16))
        return normals

    def _sample_words(self, count: int) -> NDArray[np.uint32]:
        return self.bits.randint(0, 1 << 32, count, np.uint32)

    def _sample_uniforms(self, count: int) -> Floats:
        return (self._sample_words(count) & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)

    def _sample_normal_in_double(self) -> float:
        if self.spare_normal is not None:
            spare_normal = self.spare_normal
            self.spare_normal = None
            return spare_normal
        words = [int(word) for word in self._sample_words(4)]
        angle_fraction, radius_fraction = (
            ((high << 32 | low) & (1 << 53) - 1) * 2.0**-53 for high, low in (words[:2], words[2:])
        )
        radius = math.sqrt(-2 * math.log1p(-radius_fraction))
        angle = 2 * math.pi * angle_fraction
        self.spare_normal = radius * math.sin(angle)
        return radius * math.cos(angle)


def _apply_box_muller(uniform: Floats) -> Floats:
    """Return as many normal numbers as uniform numbers from 0 to 1; PyTorch pairs number i of 16 with number i + 8."""
    pairs = uniform.reshape(-1, 2, 8)
    radius = np.sqrt(np.float32(-2) * _compute_log(np.float32(1) - pairs[:, 0]))
    sine, cosine = _compute_sine_and_cosine(np.float32(2 * math.pi) * pairs[:, 1])
    return np.stack([radius * cosine, radius * sine], 1).ravel()


def _multiply_add(a: Floats, b: Floats | float, c: Floats | float) -> Floats:
    """Return a * b + c, rounded to float32 once, like a fused multiply-add instruction."""
    product = a.astype(np.float64) * np.asarray(b, np.float32)
    return (product + np.asarray(c, np.float32)).astype(np.float32)


def _evaluate_polynomial(x: Floats, coefficients: tuple[float, ...]) -> Floats:
    """Return the polynomial of `x` by Horner's method, with the highest coefficient first."""
    y = np.full_like(x, coefficients[0])
    for factor in coefficients[1:]:
        y = _multiply_add(y, x, factor)
    return y


def _compute_log(x: Floats) -> Floats:
    """Return natural logarithms with the operations of `log256_ps` in `avx_mathfun.h`."""
    x, exponent = np.frexp(x)
    low = x < np.float32(0.707106781186547524)
    e = (exponent - low).astype(np.float32)
    x = np.where(low, x + x, x) - np.float32(1)
    z = x * x
    y = _multiply_add(_evaluate_polynomial(x, LOG_COEFFICIENTS) * x, z, e * np.float32(-2.12194440e-4))
    return _multiply_add(e, 0.693359375, x + (y - z * np.float32(0.5)))


def _compute_sine_and_cosine(x: Floats) -> tuple[Floats, Floats]:
    """Return sines and cosines of angles from 0 to 2 pi with the operations of `sincos256_ps` in `avx_mathfun.h`."""
    octant = (x * np.float32(1.27323954473516)).astype(np.int32) + 1 & ~1
    for summand in MINUS_QUARTER_PI:
        x = _multiply_add(octant.astype(np.float32), summand, x)
    z = x * x
    cosine = _multiply_add(_evaluate_polynomial(z, COSINE_COEFFICIENTS) * z, z, z * np.float32(-0.5)) + np.float32(1)
    sine = _multiply_add(_evaluate_polynomial(z, SINE_COEFFICIENTS) * z, x, x)
    swapped = octant & 2 != 0
    sine_size = np.where(swapped, cosine, sine)
    cosine_size = np.where(swapped, sine, cosine)
    return np.where(octant & 4, -sine_size, sine_size), np.where(octant - 2 & 4, cosine_size, -cosine_size)


if __name__ == "__main__":
    write_checkpoints()
