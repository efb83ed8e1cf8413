"""Pictures to feature vectors: by a user's ONNX graph, or by the bundle's own VQ encoder.

Does not know what the features are compared for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL.Image import Image

from ..bundle.files import Bundle
from ..errors import RequestError
from .picture_graph import PictureGraph, Preprocessing
from .statistics import Floats


class Extractor(Protocol):
    """Makes features. name: what they are. file and sha256: of the graph."""

    name: str
    file: str
    sha256: str

    def __call__(self, pictures: Sequence[Image]) -> Floats:
        """Features `[pictures, width]` of pictures of one size."""
        ...


class GraphFeatures:
    """Features by an ONNX graph with one float input `[n, 3, height, width]`.

    Its first output is taken (or `output`): `[n, width]` as it is, `[n, tokens, width]` and `[n, width, h, w]` averaged
    over tokens or places. RequestError if the file is no such graph.
    """

    def __init__(
        self, path: Path, prepare: Preprocessing, name: str, threads: int | None = None, output: str | None = None
    ) -> None:
        self.graph = PictureGraph(path, prepare, "features", threads)
        if self.graph.others:
            self.graph.refuse_inputs("one float [n, 3, h, w]")
        self.name, self.file, self.sha256, self.output = name, path.name, self.graph.sha256, output

    def __call__(self, pictures: Sequence[Image]) -> Floats:
        """Features float64 `[pictures, width]`."""
        batch = self.graph.batch
        return np.concatenate([self._run(pictures[i : i + batch]) for i in range(0, len(pictures), batch)])

    def _run(self, pictures: Sequence[Image]) -> Floats:
        features = self.graph.run(pictures, output=self.output)
        if features.ndim not in (2, 3, 4) or len(features) != (self.graph.fixed or len(pictures)):
            raise RequestError(
                f"features {self.file}: found an output {list(features.shape)}, "
                "expected [n, width], [n, tokens, width] or [n, width, h, w]"
            )
        return self._pool(features[: len(pictures)])

    def _pool(self, features: Floats) -> Floats:
        """One vector `[n, width]` per picture."""
        if features.ndim == 2:
            return features
        return np.asarray(features.mean((2, 3) if features.ndim == 4 else 1))


class EncoderFeatures(GraphFeatures):
    """Features by a bundle's graph `vq_encoder`: what a picture looks like to its own tokenizer.

    Per channel of the vectors before quantisation, the mean of every quarter of the picture, and the standard
    deviation over all of it: five numbers a channel, so that a few hundred pictures suffice.
    """

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        half = (0.5, 0.5, 0.5)
        path = bundle.path("vq_encoder")
        super().__init__(path, Preprocessing(None, half, half), "VQ encoder features", threads, "pre_quant")

    def _pool(self, features: Floats) -> Floats:
        middle, centre = features.shape[2] // 2, features.shape[3] // 2
        rows, columns = (slice(0, middle), slice(middle, None)), (slice(0, centre), slice(centre, None))
        quarters = [features[:, :, row, column].mean((2, 3)) for row in rows for column in columns]
        return np.concatenate([*quarters, features.std((2, 3))], 1)


def bundle_features(bundle: Bundle, threads: int | None = None) -> GraphFeatures | None:
    """The bundle's own features; None if it has no `vq_encoder`."""
    return EncoderFeatures(bundle, threads) if "vq_encoder" in bundle.manifest.files else None
