"""Pictures to feature vectors: by a user's ONNX graph, or by the bundle's own VQ encoder.

Does not know what the features are compared for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image, Resampling

from ..bundle import Bundle
from ..checks import brief
from ..engines.host import usable_cores
from ..engines.onnxruntime_session import import_onnxruntime
from ..errors import RequestError
from .statistics import Floats

BATCH = 8  # pictures in one run, where the graph leaves it open
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
Triple = tuple[float, float, float]


class Extractor(Protocol):
    """Makes features. name: what they are. file and sha256: of the graph."""

    name: str
    file: str
    sha256: str

    def __call__(self, pictures: Sequence[Image]) -> Floats:
        """Features `[pictures, width]` of pictures of one size."""
        ...


@dataclass(frozen=True)
class Preprocessing:
    """What is done to pictures first: resized to size x size (bicubic) if given; then (value - mean) / std by channel,
    of RGB values 0 .. 1."""

    size: int | None = None
    mean: Triple = (0.0, 0.0, 0.0)
    std: Triple = (1.0, 1.0, 1.0)


class GraphFeatures:
    """Features by an ONNX graph with one float input `[n, 3, height, width]`.

    Its first output is taken (or `output`): `[n, width]` as it is, `[n, tokens, width]` and `[n, width, h, w]` averaged
    over tokens or places. RequestError if the file is no such graph.
    """

    def __init__(
        self, path: Path, prepare: Preprocessing, name: str, threads: int | None = None, output: str | None = None
    ) -> None:
        self.name, self.file, self.prepare, self.output = name, path.name, prepare, output
        runtime = import_onnxruntime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads or usable_cores()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4
        try:
            with path.open("rb") as file:
                self.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            self.session: Any = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise RequestError(f"features {path}: no ONNX graph that can be loaded ({brief(error)})") from error
        inputs = self.session.get_inputs()
        shape = inputs[0].shape if inputs else []
        pictures = len(shape) == 4 and (shape[1] == 3 or not isinstance(shape[1], int))
        if len(inputs) != 1 or not pictures or inputs[0].type not in _TYPES:
            found = ", ".join(f"{tensor.name} {tensor.type} {tensor.shape}" for tensor in inputs)
            raise RequestError(f"features {path}: found inputs {found or 'none'}, expected one float [n, 3, h, w]")
        self.input, self.dtype = inputs[0].name, _TYPES[inputs[0].type]
        self.fixed = shape[0] if isinstance(shape[0], int) else None
        self.height, self.width = (size if isinstance(size, int) else prepare.size for size in shape[2:])
        if prepare.size is not None and (self.height, self.width) != (prepare.size, prepare.size):
            raise RequestError(
                f"feature-size: found {prepare.size}, but {path} takes {self.height} x {self.width}; leave it out"
            )

    def __call__(self, pictures: Sequence[Image]) -> Floats:
        """Features float64 `[pictures, width]`."""
        batch = self.fixed or BATCH
        parts = []
        for start in range(0, len(pictures), batch):
            pixels = np.stack([self._pixels(picture) for picture in pictures[start : start + batch]])
            count = len(pixels)
            if self.fixed is not None and count < self.fixed:
                pixels = np.concatenate([pixels, np.repeat(pixels[-1:], self.fixed - count, 0)])
            parts.append(self._run(pixels)[:count])
        return np.concatenate(parts)

    def _run(self, pixels: NDArray[Any]) -> Floats:
        try:
            found = self.session.run(None if self.output is None else [self.output], {self.input: pixels})[0]
        except Exception as error:
            raise RequestError(
                f"features {self.file}: failed on pictures {list(pixels.shape)} ({brief(error)}); "
                "--feature-size sets another size"
            ) from error
        features = np.asarray(found, np.float64)
        if features.ndim not in (2, 3, 4) or len(features) != len(pixels):
            raise RequestError(
                f"features {self.file}: found an output {list(features.shape)}, "
                "expected [n, width], [n, tokens, width] or [n, width, h, w]"
            )
        if not np.isfinite(features).all():
            raise RequestError(f"features {self.file}: gave NaN or infinity")
        return self._pool(features)

    def _pool(self, features: Floats) -> Floats:
        """One vector `[n, width]` per picture."""
        if features.ndim == 2:
            return features
        return np.asarray(features.mean((2, 3) if features.ndim == 4 else 1))

    def _pixels(self, picture: Image) -> NDArray[Any]:
        size = (self.width or picture.width, self.height or picture.height)
        resized = picture if picture.size == size else picture.resize(size, Resampling.BICUBIC)
        values = np.asarray(resized.convert("RGB"), np.float64) / 255
        scaled = (values - self.prepare.mean) / self.prepare.std  # [height, width, 3]
        return np.ascontiguousarray(scaled.transpose(2, 0, 1)).astype(self.dtype)


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
