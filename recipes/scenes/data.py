"""Random scenes of a seed, rendered as images in parallel processes."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .render import SIZE, render
from .vocabulary import Scene, sample_scene

CHUNK = 125  # number of scenes that a process renders at a time
FEWEST = 500  # minimum number of scenes for which processes are started; one core renders as many in a second


def sample_scenes(count: int, seed: int) -> list[Scene]:
    """Return `count` random scenes; the same seed gives the same scenes."""
    rng = np.random.default_rng((seed, 0))
    return [sample_scene(rng) for _ in range(count)]


def render_images(count: int, seed: int, size: int = SIZE, workers: int | None = None) -> NDArray[np.uint8]:
    """Render the scenes of `sample_scenes(count, seed)` as images, uint8 `[count, size, size, 3]`.

    Args:
        size: height and width of the images in pixels.
        workers: maximum number of processes; None: one per processor core.
    """
    return render_scenes(sample_scenes(count, seed), size, workers)


def render_scenes(scenes: list[Scene], size: int = SIZE, workers: int | None = None) -> NDArray[np.uint8]:
    """Render scenes as images, uint8 `[scenes, size, size, 3]`.

    Args:
        size: height and width of the images in pixels.
        workers: maximum number of processes; None: one per processor core.
    """
    chunks = [scenes[i : i + CHUNK] for i in range(0, len(scenes), CHUNK)]
    pictures = np.empty((len(scenes), size, size, 3), np.uint8)
    workers = min(workers or os.cpu_count() or 1, len(chunks))
    paint = partial(_render_chunk, size=size)
    if workers <= 1 or len(scenes) < FEWEST:
        done = map(paint, chunks)
        return np.concatenate(list(done)) if chunks else pictures
    with ProcessPoolExecutor(workers) as pool:
        for i, part in enumerate(pool.map(paint, chunks)):
            pictures[i * CHUNK : i * CHUNK + len(part)] = part
    return pictures


def _render_chunk(scenes: list[Scene], size: int) -> NDArray[np.uint8]:
    return np.stack([render(scene, size) for scene in scenes])
