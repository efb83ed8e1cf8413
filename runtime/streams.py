"""Random streams of one request, so that neither the batch nor the method's other draws move them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Streams:
    """Independent generators: `draft` proposes children, `accept` decides on them, `residual` draws what is left."""

    draft: np.random.Generator
    accept: np.random.Generator
    residual: np.random.Generator


def open_streams(rng: np.random.Generator) -> Streams:
    """Split the request's generator into its named streams."""
    draft, accept, residual = rng.spawn(3)
    return Streams(draft, accept, residual)
