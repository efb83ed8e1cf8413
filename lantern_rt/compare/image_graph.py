"""ONNX graphs that look at images: features of them, and their agreement with prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image, Resampling
from tokenizers import Tokenizer

from ..bundle.files import Bundle
from ..bundle.manifest import file_sha256
from ..checks import brief
from ..engines.host import import_onnxruntime, usable_cores
from ..errors import RequestError
from ..requests import bundle_tokenizer
from ..user_files import open_plain_file, read_plain_file, reading
from .statistics import Floats, Ints

BATCH = 8  # images in one run, where the graph leaves it open
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
_OPTION = "agreement-tokenizer"
_FILE_LIMIT = 1 << 26  # bytes
Triple = tuple[float, float, float]
Tokenize = Callable[[str], tuple[Ints, Ints]]  # a prompt's ids and attention mask, [length] each


class Preprocessing(NamedTuple):
    """Images are resized to size x size (bicubic) if given; then (value - mean) / std by channel, of RGB 0 .. 1."""

    size: int | None = None
    mean: Triple = (0.0, 0.0, 0.0)
    std: Triple = (1.0, 1.0, 1.0)


class ImageGraph(ABC):
    """An ONNX graph with one float input `[n, 3, height, width]`; `others` are its further inputs.

    role: `features` or `agreement`, in messages. batch: how many images it takes at a time. facts: its name, file and
    hash, and what else a reader of figures should know.
    Raises: RequestError: the file is no such graph.
    """

    def __init__(self, path: Path, prepare: Preprocessing, role: str, threads: int | None = None) -> None:
        self.path, self.prepare, self.role = path, prepare, role
        runtime = import_onnxruntime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads or usable_cores()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4
        try:
            with open_plain_file(path):
                sha256 = file_sha256(path)
            self.session: Any = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            inputs = self.session.get_inputs()
            taking = [one for one in inputs if one.type in _TYPES and len(one.shape) == 4]
        except Exception as error:
            raise RequestError(f"{role} {path}: no ONNX graph that can be loaded ({brief(error)})") from error
        self.facts: dict[str, Any] = {"name": path.stem, "file": path.name, "sha256": sha256}
        taking = [one for one in taking if one.shape[1] == 3 or not isinstance(one.shape[1], int)]
        if len(taking) != 1:
            self._refuse_inputs("one float [n, 3, h, w]")
        self.others = [tensor for tensor in inputs if tensor is not taking[0]]
        shape = taking[0].shape
        self.input, self.dtype = taking[0].name, _TYPES[taking[0].type]
        self.fixed = shape[0] if isinstance(shape[0], int) else None
        self.batch = self.fixed or BATCH
        self.height, self.width = (size if isinstance(size, int) else prepare.size for size in shape[2:])
        self.size_option = f"{role.removesuffix('s')}-size"
        if prepare.size is not None and (self.height, self.width) != (prepare.size, prepare.size):
            raise RequestError(
                f"{self.size_option}: found {prepare.size}, but {path} takes {self.height} x {self.width}; leave it out"
            )

    def _refuse_inputs(self, expected: str) -> NoReturn:
        found = ", ".join(f"{tensor.name} {tensor.type} {tensor.shape}" for tensor in self.session.get_inputs())
        raise RequestError(f"{self.role} {self.path}: found inputs {found or 'none'}, expected {expected}")

    def _run(
        self, images: Sequence[Image], texts: Mapping[str, Ints] | None = None, output: str | None = None
    ) -> Floats:
        """The first output, or the named one, float64, of images of one size, in batches, as `_rows` takes it.

        texts: the further inputs, one row an image. A graph that takes a fixed number of images is given the last one
        again.
        """
        found = []
        for start in range(0, len(images), self.batch):
            some = slice(start, start + self.batch)
            inputs: dict[str, NDArray[Any]] = {self.input: np.stack([self._pixels(image) for image in images[some]])}
            inputs |= {name: values[some] for name, values in (texts or {}).items()}
            given = len(inputs[self.input])
            rows = np.minimum(np.arange(self.fixed or given), given - 1)
            inputs = {name: values[rows] for name, values in inputs.items()}
            try:
                values = np.asarray(self.session.run(output and [output], inputs)[0], np.float64)
            except Exception as error:
                shapes = ", ".join(f"{name} {list(values.shape)}" for name, values in inputs.items())
                longest = ", truncation in the tokenizer's file the most tokens" if texts else ""
                raise RequestError(
                    f"{self.role} {self.path.name}: failed on {shapes} ({brief(error)}); "
                    f"--{self.size_option} sets another size{longest}"
                ) from error
            if not np.isfinite(values).all():
                raise RequestError(f"{self.role} {self.path.name}: gave NaN or infinity")
            found.append(self._rows(values, len(rows))[:given])
        return np.concatenate(found)

    @abstractmethod
    def _rows(self, values: Floats, count: int) -> Floats:
        """What is wanted of an output of `count` images, a row an image. Raises: RequestError: it has no such rows."""

    def _pixels(self, image: Image) -> NDArray[Any]:
        size = (self.width or image.width, self.height or image.height)
        resized = image if image.size == size else image.resize(size, Resampling.BICUBIC)
        values = np.asarray(resized.convert("RGB"), np.float64) / 255
        scaled = (values - self.prepare.mean) / self.prepare.std  # [height, width, 3]
        return np.ascontiguousarray(scaled.transpose(2, 0, 1)).astype(self.dtype)


# ---------------------------------------------------------------- features


class Features(ImageGraph):
    """Features of images by a graph's first output: `[n, features]` as it is, `[n, tokens, features]` and
    `[n, features, h, w]` averaged over tokens or places.

    Raises: RequestError: the graph has further inputs, or another output.
    """

    output: str | None = None

    def __init__(self, path: Path, prepare: Preprocessing, threads: int | None = None) -> None:
        super().__init__(path, prepare, "features", threads)
        if self.others:
            self._refuse_inputs("one float [n, 3, h, w]")

    def __call__(self, images: Sequence[Image]) -> Floats:
        """Features float64 `[images, features]` of images of one size."""
        return self._run(images, output=self.output)

    def _rows(self, values: Floats, count: int) -> Floats:
        if values.ndim not in (2, 3, 4) or len(values) != count:
            raise RequestError(
                f"features {self.path.name}: found an output {list(values.shape)}, "
                "expected [n, features], [n, tokens, features] or [n, features, h, w]"
            )
        return values if values.ndim == 2 else np.asarray(values.mean((2, 3) if values.ndim == 4 else 1))


class EncoderFeatures(Features):
    """Features by a bundle's graph `vq_encoder`: what an image looks like to its own tokenizer.

    Per channel of the vectors before quantisation, the mean of every quarter of the image, and the standard deviation
    over all of it: five numbers a channel, so that a few hundred images suffice.
    """

    output = "pre_quant"

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        half = (0.5, 0.5, 0.5)
        super().__init__(bundle.path("vq_encoder"), Preprocessing(None, half, half), threads)
        self.facts["name"] = "VQ encoder features"

    def _rows(self, values: Floats, count: int) -> Floats:
        super()._rows(values, count)  # checks them
        height, width = values.shape[2] // 2, values.shape[3] // 2
        quarters = [quarter for half in np.split(values, [height], 2) for quarter in np.split(half, [width], 3)]
        return np.concatenate([*(quarter.mean((2, 3)) for quarter in quarters), values.std((2, 3))], 1)


# ---------------------------------------------------------------- agreement with prompts


class Agreement(ImageGraph):
    """How well images show their prompts, by a graph with an int64 input `[n, length]` of token ids, and maybe another
    of an attention mask.

    Its first output is taken: `[n]` or `[n, 1]`, or `[n, n]` of every image with every prompt, whose diagonal is meant.
    Tokens are those of a `tokenizer.json`, or of a bundle's words. Where the graph leaves `length` open, prompts of
    different length are not run together, so that none is padded.
    Raises: RequestError: the graph is no such graph, or the tokenizer does not fit.
    """

    def __init__(self, path: Path, prepare: Preprocessing, tokens: Path | Bundle, threads: int | None = None) -> None:
        super().__init__(path, prepare, "agreement", threads)
        texts = self.others
        if len(texts) not in (1, 2) or any(one.type != "tensor(int64)" or len(one.shape) != 2 for one in texts):
            self._refuse_inputs("one float [n, 3, h, w] and one int64 [n, length], or two with an attention mask")
        if "mask" in texts[0].name:
            texts = texts[::-1]
        self.names = [tensor.name for tensor in texts]  # ids, and maybe the mask
        length = texts[0].shape[1] if isinstance(texts[0].shape[1], int) else None
        if isinstance(tokens, Path):
            self.facts["tokenizer"], self.tokenize = tokens.name, file_tokens(tokens, length)
        else:
            self.facts["tokenizer"] = f"the tokenizer of {tokens.manifest.name}"
            self.tokenize = bundle_tokens(tokens, length)

    def __call__(self, images: Sequence[Image], prompts: Sequence[str]) -> Floats:
        """Agreement float64 `[images]` of each image with its prompt, more where they agree."""
        found = np.zeros(len(images))
        tokens = [self.tokenize(prompt) for prompt in prompts]
        lengths = np.array([len(ids) for ids, _ in tokens])
        for length in np.unique(lengths):
            alike = np.flatnonzero(lengths == length).tolist()
            texts = np.stack([tokens[i] for i in alike], 1)  # [ids and mask, images, length]
            found[alike] = self._run([images[i] for i in alike], dict(zip(self.names, texts, strict=False)))
        return found

    def _rows(self, values: Floats, count: int) -> Floats:
        if values.shape not in ((count,), (count, 1), (count, count)):
            raise RequestError(
                f"agreement {self.path.name}: found an output {list(values.shape)} of {count} images, "
                "expected [n], [n, 1] or [n, n]"
            )
        return values.diagonal() if values.shape == (count, count) else values.ravel()


def file_tokens(path: Path, length: int | None) -> Tokenize:
    """Tokens by a `tokenizer.json` with its own special tokens, truncation and padding.

    length: how many ids a prompt must have; None leaves that to the file.
    Raises: RequestError: no such file, or it does not pad.
    """
    with reading(path, "a tokenizer.json", RequestError, f"give another with {_OPTION}"):
        library = Tokenizer.from_str(read_plain_file(path, _FILE_LIMIT).decode())
    if length is not None:
        if library.padding is None:
            raise RequestError(
                f"{_OPTION} {path}: found no padding in it, but the graph takes {length} tokens; export the graph with "
                "an open length, or save the tokenizer after its enable_padding()"
            )
        library.enable_padding(**{**library.padding, "length": length, "pad_to_multiple_of": None})
        cut = library.truncation or {"max_length": length}
        library.enable_truncation(**{**cut, "max_length": min(length, cut["max_length"])})

    def tokenize(prompt: str) -> tuple[Ints, Ints]:
        encoding = library.encode(prompt)
        if not encoding.ids:
            raise RequestError(f"{_OPTION} {path}: found no token in {prompt!r}")
        return np.array(encoding.ids, np.int64), np.array(encoding.attention_mask, np.int64)

    return tokenize


def bundle_tokens(bundle: Bundle, length: int | None) -> Tokenize:
    """Tokens by the word list of a bundle, padded with 0 to `length`, by default as long as the model reads them.

    Raises: RequestError: the bundle's tokens are those of its own text encoder; no other graph is likely to know them.
    """
    condition = bundle.manifest.condition
    words = bundle_tokenizer(bundle) if condition.kind == "words" else None
    if words is None:
        raise RequestError(
            f"{_OPTION}: bundle {bundle.manifest.name} has no word list of its own; give the tokenizer.json that "
            "belongs to --agreement"
        )

    def tokenize(prompt: str) -> tuple[Ints, Ints]:
        ids = words.encode(prompt, length or condition.prefix)
        return ids, (ids != 0).astype(np.int64)

    return tokenize
