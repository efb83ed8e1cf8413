"""How fast this host reads memory: the bound of a pass, which has to read all weights once.

Does not know graphs; imports no backend.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

REPEATS = 6  # the first warms up


def read_bandwidth(size: int, threads: int) -> float:
    """Bytes per second at which `threads` threads read an array of `size` bytes, at least a megabyte; best of five.

    Each thread looks for the largest number of its share, which costs little beside reading it. An array that fits
    in a cache is read from there, as weights of its size would be.
    """
    numbers = np.ones(max(size, 2**20) // 4, np.float32)
    shares = np.array_split(numbers, threads)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(REPEATS):
            began = time.perf_counter()
            list(pool.map(np.max, shares))
            seconds.append(time.perf_counter() - began)
    return numbers.nbytes / min(seconds[1:])
