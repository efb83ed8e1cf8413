"""Write the checkpoints in `tests/data` that are not stored, because PyTorch's random numbers can be computed again.

`drawn-weights` has each file with these numbers taken out, and `recipe.json` says where they belong. A stream has seeds
and draws. A draw `[count, mean, factor, fan]` stands for mean + factor * normal / sqrt(fan). A file has places
`[byte, first, count]`, where numbers of its stream stand. Every processor computes the bits that PyTorch 2.13 gave on
x86 with AVX2 (`avx_mathfun.h`), an operation at a time; SHA-256 is that of the file which the published programs read.
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
DRAWN = DATA / "drawn-weights"
Floats = NDArray[np.float32]
LOGARITHM = (7.0376836292e-2, -1.151461031e-1, 1.167699874e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1)
LOGARITHM += (2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)
COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
QUARTER_TURN = (-0.78515625, -2.4187564849853515625e-4, -3.77489497744594108e-8)  # half of one, in three parts


def write_checkpoints() -> None:
    """Write checkpoints that are missing or differ."""
    recipe = json.loads((DRAWN / "recipe.json").read_text())
    streams: dict[str, Floats] = {}
    for name, file in recipe["files"].items():
        path = DATA / name
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == file["sha256"]:
            continue
        stream = file["stream"]
        if stream not in streams:
            streams[stream] = _numbers(recipe["streams"][stream])
        data = np.frombuffer(bytearray(lzma.decompress((DRAWN / f"{name}.xz").read_bytes())), np.uint8)
        _put(data, _stored(streams[stream], file["dtype"]), file["places"])
        assert hashlib.sha256(data).hexdigest() == file["sha256"], f"{name}: other numbers than those it was made with"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_bytes(data)
        partial.replace(path)


def _put(data: NDArray[np.uint8], numbers: NDArray[Any], places: list[tuple[int, int, int]]) -> None:
    width = numbers.itemsize
    numbers = numbers.view(np.uint8)
    for byte, first, count in places:
        data[byte : byte + count * width] ^= numbers[first * width : (first + count) * width]


def _stored(numbers: Floats, dtype: str) -> NDArray[Any]:
    if dtype != "bfloat16":
        return numbers.astype(dtype)
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _numbers(draws: list[Any]) -> Floats:
    numbers = []
    for draw in draws:
        if isinstance(draw, int):
            generator = Generator(draw)
            continue
        count, mean, factor, fan = draw
        numbers.append(generator.normals(count) * np.float32(factor) / np.float32(math.sqrt(fan)) + np.float32(mean))
    return np.concatenate(numbers)


class Generator:
    """PyTorch's generator for the CPU."""

    def __init__(self, seed: int) -> None:
        self.bits = np.random.RandomState(seed)  # Mersenne Twister, seeded alike
        self.second: float | None = None  # of a pair whose first number was taken

    def normals(self, count: int) -> Floats:
        """Return what `torch.randn` gives."""
        if count < 16:
            return np.array([self._normal() for _ in range(count)], np.float32)
        uniform = self._uniform(count)
        end = count - count % 16
        normals = np.concatenate([_box_muller(uniform[:end]), uniform[end:]])
        if end < count:
            normals[-16:] = _box_muller(self._uniform(16))
        return normals

    def _raw(self, count: int) -> NDArray[np.uint32]:
        return self.bits.randint(0, 1 << 32, count, np.uint32)

    def _uniform(self, count: int) -> Floats:
        return (self._raw(count) & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)

    def _normal(self) -> float:
        if self.second is not None:
            second = self.second
            self.second = None
            return second
        words = [int(word) for word in self._raw(4)]
        turn, other = (((high << 32 | low) & (1 << 53) - 1) * 2.0**-53 for high, low in (words[:2], words[2:]))
        radius = math.sqrt(-2 * math.log1p(-other))
        angle = 2 * math.pi * turn
        self.second = radius * math.sin(angle)
        return radius * math.cos(angle)


def _box_muller(uniform: Floats) -> Floats:
    pairs = uniform.reshape(-1, 2, 8)
    radius = np.sqrt(np.float32(-2) * _logarithm(np.float32(1) - pairs[:, 0]))
    sine, cosine = _sine_cosine(np.float32(2 * math.pi) * pairs[:, 1])
    return np.stack([radius * cosine, radius * sine], 1).ravel()


def _fused(a: Floats, b: Floats | float, c: Floats | float) -> Floats:
    """Return a * b + c, rounded once."""
    product = a.astype(np.float64) * np.asarray(b, np.float32)
    return (product + np.asarray(c, np.float32)).astype(np.float32)


def _polynomial(x: Floats, factors: tuple[float, ...]) -> Floats:
    y = np.full_like(x, factors[0])
    for factor in factors[1:]:
        y = _fused(y, x, factor)
    return y


def _logarithm(x: Floats) -> Floats:
    x, exponent = np.frexp(x)
    low = x < np.float32(0.707106781186547524)
    e = (exponent - low).astype(np.float32)
    x = np.where(low, x + x, x) - np.float32(1)
    z = x * x
    y = _fused(_polynomial(x, LOGARITHM) * x, z, e * np.float32(-2.12194440e-4))
    return _fused(e, 0.693359375, x + (y - z * np.float32(0.5)))


def _sine_cosine(x: Floats) -> tuple[Floats, Floats]:
    octant = (x * np.float32(1.27323954473516)).astype(np.int32) + 1 & ~1
    for part in QUARTER_TURN:
        x = _fused(octant.astype(np.float32), part, x)
    z = x * x
    cosine = _fused(_polynomial(z, COSINE) * z, z, z * np.float32(-0.5)) + np.float32(1)
    sine = _fused(_polynomial(z, SINE) * z, x, x)
    swapped = octant & 2 != 0
    sine, cosine = np.where(swapped, cosine, sine), np.where(swapped, sine, cosine)
    return np.where(octant & 4, -sine, sine), np.where(octant - 2 & 4, cosine, -cosine)


if __name__ == "__main__":
    write_checkpoints()
