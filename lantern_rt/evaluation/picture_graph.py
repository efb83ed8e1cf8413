"""ONNX graphs that take pictures: how these are prepared, and running a graph on a few at a time.

Does not know what graphs are for, nor what their outputs mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image, Resampling

from ..bundle.manifest import file_sha256
from ..checks import brief
from ..engines.host import usable_cores
from ..engines.ort.session import import_onnxruntime
from ..errors import RequestError
from .statistics import Floats, Ints

BATCH = 8  # pictures in one run, where the graph leaves it open
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Preprocessing:
    """What is done to pictures first: resized to size x size (bicubic) if given; then (value - mean) / std by channel,
    of RGB values 0 .. 1."""

    size: int | None = None
    mean: Triple = (0.0, 0.0, 0.0)
    std: Triple = (1.0, 1.0, 1.0)


class PictureGraph:
    """An ONNX graph with one float input `[n, 3, height, width]`; `others` are its further inputs.

    role: what it is for, `features` or `agreement`, in messages. batch: how many pictures it takes at a time.
    RequestError if the file is no such graph.
    """

    def __init__(self, path: Path, prepare: Preprocessing, role: str, threads: int | None = None) -> None:
        self.path, self.prepare, self.role = path, prepare, role
        runtime = import_onnxruntime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads or usable_cores()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4
        try:
            self.sha256 = file_sha256(path)
            self.session: Any = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise RequestError(f"{role} {path}: no ONNX graph that can be loaded ({brief(error)})") from error
        inputs = self.session.get_inputs()
        taking = [tensor for tensor in inputs if _takes_pictures(tensor)]
        if len(taking) != 1:
            self.refuse_inputs("one float [n, 3, h, w]")
        self.others = [tensor for tensor in inputs if tensor is not taking[0]]
        shape = taking[0].shape
        self.input, self.dtype = taking[0].name, _TYPES[taking[0].type]
        self.fixed = shape[0] if isinstance(shape[0], int) else None
        self.batch = self.fixed or BATCH
        self.height, self.width = (size if isinstance(size, int) else prepare.size for size in shape[2:])
        if prepare.size is not None and (self.height, self.width) != (prepare.size, prepare.size):
            raise RequestError(
                f"{self.size_option}: found {prepare.size}, but {path} takes {self.height} x {self.width}; leave it out"
            )

    @property
    def size_option(self) -> str:
        """The option that says how large pictures should be."""
        return f"{self.role.removesuffix('s')}-size"

    def refuse_inputs(self, expected: str) -> NoReturn:
        """Raise the RequestError that lists the graph's inputs."""
        found = ", ".join(f"{tensor.name} {tensor.type} {tensor.shape}" for tensor in self.session.get_inputs())
        raise RequestError(f"{self.role} {self.path}: found inputs {found or 'none'}, expected {expected}")

    def run(
        self, pictures: Sequence[Image], others: Mapping[str, Ints] | None = None, output: str | None = None
    ) -> Floats:
        """The first output, or the named one, float64, of 1 .. `batch` pictures of one size.

        others: the further inputs, one row a picture. A graph that takes a fixed number of pictures is given the last
        one again, so that the output may have rows too many.
        """
        pixels = np.stack([self._pixels(picture) for picture in pictures])
        inputs: dict[str, NDArray[Any]] = {self.input: pixels, **(others or {})}
        if self.fixed is not None:
            rows = np.minimum(np.arange(self.fixed), len(pictures) - 1)
            inputs = {name: values[rows] for name, values in inputs.items()}
        try:
            found = self.session.run(None if output is None else [output], inputs)[0]
        except Exception as error:
            shapes = ", ".join(f"{name} {list(values.shape)}" for name, values in inputs.items())
            longest = ", truncation in the tokenizer's file the most tokens" if others else ""
            raise RequestError(
                f"{self.role} {self.path.name}: failed on {shapes} ({brief(error)}); "
                f"--{self.size_option} sets another size{longest}"
            ) from error
        values = np.asarray(found, np.float64)
        if not np.isfinite(values).all():
            raise RequestError(f"{self.role} {self.path.name}: gave NaN or infinity")
        return values

    def _pixels(self, picture: Image) -> NDArray[Any]:
        size = (self.width or picture.width, self.height or picture.height)
        resized = picture if picture.size == size else picture.resize(size, Resampling.BICUBIC)
        values = np.asarray(resized.convert("RGB"), np.float64) / 255
        scaled = (values - self.prepare.mean) / self.prepare.std  # [height, width, 3]
        return np.ascontiguousarray(scaled.transpose(2, 0, 1)).astype(self.dtype)


def _takes_pictures(tensor: Any) -> bool:
    shape = tensor.shape
    return tensor.type in _TYPES and len(shape) == 4 and (shape[1] == 3 or not isinstance(shape[1], int))
