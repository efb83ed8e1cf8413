"""ONNX graphs that look at images: features of them, and their agreement with prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from PIL import ImageOps
from PIL.Image import Image, Resampling
from PIL.Image import open as open_image
from pydantic import BaseModel, ConfigDict, Field, field_validator
from tokenizers import Tokenizer

from ..bundle.files import Bundle
from ..bundle.manifest import file_sha256
from ..engines.contracts import Progress
from ..engines.host import import_onnxruntime, thread_count
from ..errors import RequestError
from ..inputs import format_error, open_plain_file, read_plain_file, reading
from .statistics import Floats, Ints

BATCH = 8  # images in one run
PREPROCESSING_FILE = "preprocessor_config.json"
TOKENIZER_FILE = "tokenizer.json"
_FILE_LIMIT = 1 << 26  # bytes
Offset = Annotated[float, Field(ge=-1e6, le=1e6)]
Scale = Annotated[float, Field(gt=0, le=1e6)]
Side = Annotated[int, Field(ge=8, le=4096)]


class Preprocessing(BaseModel):
    """How images are prepared for a graph: what is read of the `preprocessor_config.json` beside it.

    Images are resized to size x size (bicubic) if there is a size, whatever their shape; then every channel of RGB
    values 0 .. 1 becomes (value - mean) / std. Further fields, which such files have many of, are left alone.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    size: Side | None = None
    do_normalize: bool = True
    image_mean: tuple[Offset, Offset, Offset] = (0.0, 0.0, 0.0)
    image_std: tuple[Scale, Scale, Scale] = (1.0, 1.0, 1.0)

    @field_validator("size", mode="before")
    @classmethod
    def _one_side(cls, size: Any) -> Any:
        """`224`, `{"shortest_edge": 224}`, or `{"height": 224, "width": 224}`, as transformers writes it."""
        if not isinstance(size, Mapping):
            return size
        sides = list(size.values()) if size.keys() in ({"shortest_edge"}, {"height", "width"}) else []
        if not sides or sides[0] != sides[-1]:
            raise ValueError("expected a number, a shortest_edge, or the same height and width")
        return sides[0]


def read_preprocessing(graph: Path) -> Preprocessing:
    """Read the `preprocessor_config.json` beside a graph; without one, values stay 0 .. 1. Raises: RequestError."""
    path = graph.parent / PREPROCESSING_FILE
    with reading(path, f"a {PREPROCESSING_FILE}", RequestError, "mend it, or move it away from the graph"):
        try:
            text = read_plain_file(path, _FILE_LIMIT)
        except (FileNotFoundError, NotADirectoryError):
            return Preprocessing()
        return Preprocessing.model_validate_json(text)


class ImageGraph(ABC):
    """An ONNX graph with one float32 input `[n, 3, height, width]`.

    Args:
        path: of the graph.
        role: `features` or `agreement`, the option that gives it.
        prepare: how images are prepared.
        threads: to run it with, by default one per core.

    Raises:
        RequestError: the file is no such graph.
    """

    def __init__(self, path: Path, role: str, prepare: Preprocessing, threads: int | None = None) -> None:
        self.path = path
        self.role = role
        self.prepare = prepare
        runtime = import_onnxruntime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = thread_count(threads)
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4
        try:
            with open_plain_file(path):
                sha256 = file_sha256(path)
            self.session: Any = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            inputs = self.session.get_inputs()
            images = [one for one in inputs if one.type == "tensor(float)" and len(one.shape) == 4]
        except Exception as error:
            raise self._refusal(f"no ONNX graph that can be loaded ({format_error(error)})") from error
        self.facts: dict[str, Any] = {"name": path.stem, "file": path.name, "sha256": sha256}
        images = [one for one in images if one.shape[1] == 3 or not isinstance(one.shape[1], int)]
        if len(images) != 1:
            raise self._wrong_inputs("one float [n, 3, h, w]")
        (image,) = images
        self.others = [tensor for tensor in inputs if tensor is not image]  # the graph's further inputs
        self.input = image.name
        self.height, self.width = (side if isinstance(side, int) else prepare.size for side in image.shape[2:])
        if prepare.size is not None and (self.height, self.width) != (prepare.size, prepare.size):
            expected = f"{self.height} x {self.width}, as the graph takes them"
            raise self._refusal(found=f"images of size {prepare.size} in {PREPROCESSING_FILE}", expected=expected)

    def _refusal(self, problem: str = "", found: str = "", expected: str = "", remedy: str = "") -> RequestError:
        field = f"{self.role} {self.path}"
        return RequestError(problem, field=field, found=found, expected=expected, remedy=remedy)

    def _wrong_inputs(self, expected: str) -> RequestError:
        inputs = ", ".join(f"{tensor.name} {tensor.type} {tensor.shape}" for tensor in self.session.get_inputs())
        return self._refusal(found=f"inputs {inputs or 'none'}", expected=expected)

    def _run(
        self, images: Sequence[Image], texts: Mapping[str, Ints] | None = None, output: str | None = None
    ) -> Floats:
        """What `_rows` makes of an output (by default the first), float64, of images of one size, in batches.

        texts: the further inputs, one row an image.
        """
        parts = []
        for start in range(0, len(images), BATCH):
            some = slice(start, start + BATCH)
            inputs: dict[str, NDArray[Any]] = {self.input: np.stack([self._pixels(image) for image in images[some]])}
            inputs |= {name: values[some] for name, values in (texts or {}).items()}
            try:
                values = np.asarray(self.session.run(output and [output], inputs)[0], np.float64)
            except Exception as error:
                shapes = ", ".join(f"{name} {list(values.shape)}" for name, values in inputs.items())
                remedy = f"export it for any number of images; {PREPROCESSING_FILE} beside it sets another size"
                remedy += f", truncation in {TOKENIZER_FILE} the most tokens" if texts else ""
                raise self._refusal(f"failed on {shapes} ({format_error(error)})", remedy=remedy) from error
            if not np.isfinite(values).all():
                raise self._refusal("gave NaN or infinity")
            parts.append(self._rows(values, len(images[some])))
        return np.concatenate(parts)

    @abstractmethod
    def _rows(self, values: Floats, count: int) -> Floats:
        """What is wanted of an output of `count` images, a row an image. Raises: RequestError: it has no such rows."""

    def _pixels(self, image: Image) -> NDArray[Any]:
        size = (self.width or image.width, self.height or image.height)
        resized = image if image.size == size else image.resize(size, Resampling.BICUBIC)
        values = np.asarray(resized.convert("RGB"), np.float64) / 255
        if self.prepare.do_normalize:
            values = (values - self.prepare.image_mean) / self.prepare.image_std
        return np.ascontiguousarray(values.transpose(2, 0, 1)).astype(np.float32)


# ---------------------------------------------------------------- features


class Features(ImageGraph):
    """Features of images by a graph's first output.

    `[n, features]` is taken as it is, `[n, tokens, features]` and `[n, features, h, w]` are averaged over tokens or
    places.

    Raises:
        RequestError: the graph has further inputs, or another output.
    """

    output: str | None = None

    def __init__(self, path: Path, prepare: Preprocessing, threads: int | None = None) -> None:
        super().__init__(path, "features", prepare, threads)
        if self.others:
            raise self._wrong_inputs("one float [n, 3, h, w]")

    def __call__(self, images: Sequence[Image]) -> Floats:
        """Features float64 `[images, features]` of images of one size."""
        return self._run(images, output=self.output)

    def _rows(self, values: Floats, count: int) -> Floats:
        if values.ndim not in (2, 3, 4) or len(values) != count:
            expected = "[n, features], [n, tokens, features] or [n, features, h, w]"
            raise self._refusal(found=f"an output {list(values.shape)} of {count} images", expected=expected)
        return values if values.ndim == 2 else np.asarray(values.mean((2, 3) if values.ndim == 4 else 1))


def folder_features(features: Features, folder: Path, size: tuple[int, int], progress: Progress) -> Floats:
    """Features of all images in a folder, cut to the middle and brought to the `size` that a bundle draws.

    Raises:
        RequestError: there are fewer than two, or one cannot be read.
    """
    files = sorted(path for path in folder.glob("*") if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp"))
    if len(files) < 2:
        raise RequestError(field=f"reference {folder}", found=f"{len(files)} images", expected="at least 2")
    rows = []
    for number, path in enumerate(files):
        progress("features of real images", number, len(files))
        with reading(path, "an image", RequestError, "take it out of the folder"), open_plain_file(path) as file:
            image = ImageOps.fit(open_image(file).convert("RGB"), size, Resampling.BICUBIC)
        rows.append(features([image]))
    return np.concatenate(rows)


class EncoderFeatures(Features):
    """Features by a bundle's graph `vq_encoder`: what an image looks like to its own tokenizer.

    Per channel of the vectors before quantisation, the mean of every quarter of the image, and the standard deviation
    over all of it: five numbers a channel, so that a few hundred images suffice.
    """

    output = "pre_quant"

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        half = (0.5, 0.5, 0.5)
        super().__init__(bundle.path("vq_encoder"), Preprocessing(image_mean=half, image_std=half), threads)
        self.facts["name"] = "VQ encoder features"

    def _rows(self, values: Floats, count: int) -> Floats:
        super()._rows(values, count)  # checks them
        height = values.shape[2] // 2
        width = values.shape[3] // 2
        quarters = [quarter for half in np.split(values, [height], 2) for quarter in np.split(half, [width], 3)]
        return np.concatenate([*(quarter.mean((2, 3)) for quarter in quarters), values.std((2, 3))], 1)


# ---------------------------------------------------------------- agreement with prompts


class Agreement(ImageGraph):
    """How well images show their prompts, by a graph with an int64 input `[n, length]` of token ids.

    It may have another of an attention mask. Its first output is taken: `[n]`, or `[n, n]` of every image with every
    prompt, whose diagonal is meant. Prompts of different length are not run together, so that none is padded.

    Args:
        path: of the graph. The `tokenizer.json` beside it says what tokens are; without one, the bundle's words.
        prepare: how images are prepared.
        bundle: that draws them.
        threads: to run it with, by default one per core.

    Raises:
        RequestError: the graph is no such graph, or there is no tokenizer for it.
    """

    def __init__(self, path: Path, prepare: Preprocessing, bundle: Bundle, threads: int | None = None) -> None:
        super().__init__(path, "agreement", prepare, threads)
        texts = self.others
        if len(texts) not in (1, 2) or any(one.type != "tensor(int64)" or len(one.shape) != 2 for one in texts):
            raise self._wrong_inputs("one float [n, 3, h, w] and one int64 [n, length], or two with an attention mask")
        if "mask" in texts[0].name:
            texts = texts[::-1]
        self.names = [tensor.name for tensor in texts]  # ids, and maybe the mask
        tokenizer = path.parent / TOKENIZER_FILE
        self.facts["tokenizer"] = TOKENIZER_FILE
        if not tokenizer.exists():
            if bundle.manifest.condition.kind != "words":  # ids of a text encoder, which no other graph knows
                problem = f"bundle {bundle.manifest.name} has no word list of its own"
                remedy = f"put the {TOKENIZER_FILE} that belongs to the graph beside it"
                raise RequestError(problem, field="agreement", remedy=remedy)
            tokenizer = bundle.path("tokenizer")
            self.facts["tokenizer"] = f"the tokenizer of {bundle.manifest.name}"
        with reading(tokenizer, f"a {TOKENIZER_FILE}", RequestError, "put the one that belongs to the graph"):
            self.tokenizer = Tokenizer.from_str(read_plain_file(tokenizer, _FILE_LIMIT).decode())
            self.tokenizer.no_padding()

    def __call__(self, images: Sequence[Image], prompts: Sequence[str]) -> Floats:
        """Agreement float64 `[images]` of each image with its prompt, more where they agree."""
        agreement = np.zeros(len(images))
        tokens = [np.array(self.tokenizer.encode(prompt).ids, np.int64) for prompt in prompts]
        lengths = np.array([len(ids) for ids in tokens])
        for length in np.unique(lengths):
            alike = np.flatnonzero(lengths == length).tolist()
            ids = np.stack([tokens[i] for i in alike])  # [images, length]
            texts = dict(zip(self.names, (ids, np.ones_like(ids)), strict=False))
            agreement[alike] = self._run([images[i] for i in alike], texts)
        return agreement

    def _rows(self, values: Floats, count: int) -> Floats:
        if values.shape not in ((count,), (count, count)):
            raise self._refusal(found=f"an output {list(values.shape)} of {count} images", expected="[n] or [n, n]")
        return values.diagonal() if values.ndim == 2 else values
