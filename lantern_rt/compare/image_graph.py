"""ONNX graphs that evaluate images: image features and agreement with prompts."""

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

from ..bundle.files import Bundle
from ..bundle.manifest import compute_sha256
from ..engines.contracts import Progress
from ..engines.host import choose_thread_count
from ..engines.ort.session import open_session
from ..errors import EngineError, RequestError
from ..inputs import (
    convert_read_errors,
    format_error,
    open_regular_file,
    read_regular_file,
    reraise_error_of_signal_handler,
)
from ..text.tokenizers import parse_tokenizer
from .statistics import Floats, Ints

BATCH = 8  # Maximum number of images per run of a graph.
PREPROCESSING_FILE = "preprocessor_config.json"
TOKENIZER_FILE = "tokenizer.json"
_FILE_LIMIT = 1 << 26  # Maximum size of a JSON file in bytes.
Offset = Annotated[float, Field(ge=-1e6, le=1e6)]
Scale = Annotated[float, Field(gt=0, le=1e6)]
Side = Annotated[int, Field(ge=8, le=4096)]


class Preprocessing(BaseModel):
    """Settings for preparing images for a graph, from the `preprocessor_config.json` in the graph's folder.

    Unknown fields are ignored. Images are resized to a height and width of `size`, without cropping. With
    `do_normalize`, each RGB value in 0 .. 1 is replaced by (value - mean) / std of its channel.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    size: Side | None = None
    do_normalize: bool = True
    image_mean: tuple[Offset, Offset, Offset] = (0.0, 0.0, 0.0)
    image_std: tuple[Scale, Scale, Scale] = (1.0, 1.0, 1.0)

    @field_validator("size", mode="before")
    @classmethod
    def _check_size(cls, size: Any) -> Any:
        # transformers writes 224, {"shortest_edge": 224} or {"height": 224, "width": 224}.
        if not isinstance(size, Mapping):
            return size
        sides = list(size.values()) if size.keys() in ({"shortest_edge"}, {"height", "width"}) else []
        if not sides or sides[0] != sides[-1]:
            raise ValueError("expected a number, a shortest_edge, or the same height and width")
        return sides[0]


def read_preprocessing(graph_path: Path) -> Preprocessing:
    """Read the `preprocessor_config.json` in a graph's folder; return the defaults if the file is missing."""
    path = graph_path.parent / PREPROCESSING_FILE
    with convert_read_errors(
        path, f"a {PREPROCESSING_FILE}", RequestError, "correct it, or move it away from the graph"
    ):
        try:
            text = read_regular_file(path, _FILE_LIMIT)
        except (FileNotFoundError, NotADirectoryError):
            return Preprocessing()
        return Preprocessing.model_validate_json(text)


def _disable_thread_spinning(session_options: Any) -> None:
    session_options.add_session_config_entry("session.intra_op.allow_spinning", "0")


class OnnxImageModel(ABC):
    """ONNX graph that evaluates images; one of its inputs has the images, float32 `[n, 3, height, width]`."""

    def __init__(self, path: Path, option_name: str, preprocessing: Preprocessing, threads: int | None = None) -> None:
        self.path = path
        self.option_name = option_name
        self.preprocessing = preprocessing
        num_threads = choose_thread_count(threads)
        try:
            with open_regular_file(path):
                sha256 = compute_sha256(path)
            self.session: Any = open_session(path, num_threads, _disable_thread_spinning)
            inputs = self.session.get_inputs()
            images = [tensor for tensor in inputs if tensor.type == "tensor(float)" and len(tensor.shape) == 4]
        except EngineError:
            raise
        except Exception as error:
            reraise_error_of_signal_handler(error)
            raise self._make_error(f"cannot be loaded as an ONNX graph ({format_error(error)})") from error
        self.facts: dict[str, Any] = {"name": path.stem, "file": path.name, "sha256": sha256}
        images = [tensor for tensor in images if tensor.shape[1] == 3 or not isinstance(tensor.shape[1], int)]
        if len(images) != 1:
            raise self._make_input_error("one float input [n, 3, h, w]")
        (image,) = images
        self.text_inputs = [tensor for tensor in inputs if tensor is not image]  # All other inputs: token ids and mask.
        self.input = image.name
        self.height, self.width = (side if isinstance(side, int) else preprocessing.size for side in image.shape[2:])
        if preprocessing.size is not None and (self.height, self.width) != (preprocessing.size, preprocessing.size):
            expected = f"{self.height} x {self.width}, the input size of the graph"
            raise self._make_error(
                found=f"images of size {preprocessing.size} in {PREPROCESSING_FILE}", expected=expected
            )

    def _make_error(self, problem: str = "", found: str = "", expected: str = "", remedy: str = "") -> RequestError:
        field = f"{self.option_name} {self.path}"
        return RequestError(problem, field=field, found=found, expected=expected, remedy=remedy)

    def _make_input_error(self, expected: str) -> RequestError:
        inputs = ", ".join(f"{tensor.name} {tensor.type} {tensor.shape}" for tensor in self.session.get_inputs())
        return self._make_error(found=f"inputs {inputs or 'none'}", expected=expected)

    def _run_batches(
        self, images: Sequence[Image], extra_inputs: Mapping[str, Ints] | None = None, output_name: str | None = None
    ) -> Floats:
        """Run the graph on images of one size in batches, and return one row of an output (None: the first) each."""
        parts = []
        for start in range(0, len(images), BATCH):
            batch = slice(start, start + BATCH)
            inputs: dict[str, NDArray[Any]] = {
                self.input: np.stack([self._preprocess_image(image) for image in images[batch]])
            }
            inputs |= {name: values[batch] for name, values in (extra_inputs or {}).items()}
            try:
                values = np.asarray(self.session.run(output_name and [output_name], inputs)[0], np.float64)
            except Exception as error:
                reraise_error_of_signal_handler(error)
                shapes = ", ".join(f"{name} {list(values.shape)}" for name, values in inputs.items())
                remedy = f"export it with a dynamic batch size; {PREPROCESSING_FILE} beside it sets the image size"
                remedy += f", truncation in {TOKENIZER_FILE} the number of tokens" if extra_inputs else ""
                raise self._make_error(f"failed on {shapes} ({format_error(error)})", remedy=remedy) from error
            if not np.isfinite(values).all():
                raise self._make_error("returned NaN or infinity")
            parts.append(self._extract_vector_per_image(values, len(images[batch])))
        return np.concatenate(parts)

    @abstractmethod
    def _extract_vector_per_image(self, values: Floats, num_images: int) -> Floats:
        """Return one row per image from the graph's output; RequestError if the output has another shape."""

    def _preprocess_image(self, image: Image) -> NDArray[Any]:
        size = (self.width or image.width, self.height or image.height)
        resized = image if image.size == size else image.resize(size, Resampling.BICUBIC)
        values = np.asarray(resized.convert("RGB"), np.float64) / 255
        if self.preprocessing.do_normalize:
            values = (values - self.preprocessing.image_mean) / self.preprocessing.image_std
        return np.ascontiguousarray(values.transpose(2, 0, 1)).astype(np.float32)


class ImageFeatureModel(OnnxImageModel):
    """ONNX graph that computes features of images, as its first output.

    The output has the shape `[n, features]`, `[n, tokens, features]` or `[n, features, h, w]`. Features of tokens or
    cells are averaged.
    """

    output_name: str | None = None

    def __init__(self, path: Path, preprocessing: Preprocessing, threads: int | None = None) -> None:
        super().__init__(path, "features", preprocessing, threads)
        if self.text_inputs:
            raise self._make_input_error("one float input [n, 3, h, w]")

    def __call__(self, images: Sequence[Image]) -> Floats:
        """Return the features of images that have the same size, float64 `[images, features]`."""
        return self._run_batches(images, output_name=self.output_name)

    def _extract_vector_per_image(self, values: Floats, num_images: int) -> Floats:
        if values.ndim not in (2, 3, 4) or len(values) != num_images:
            expected = "[n, features], [n, tokens, features] or [n, features, h, w]"
            raise self._make_error(found=f"an output {list(values.shape)} of {num_images} images", expected=expected)
        return values if values.ndim == 2 else np.asarray(values.mean((2, 3) if values.ndim == 4 else 1))


def compute_folder_features(
    feature_model: ImageFeatureModel, folder: Path, image_size: tuple[int, int], progress: Progress
) -> Floats:
    """Compute the features of all images in a folder, which are cropped and resized, float64 `[images, features]`."""
    suffixes = (".png", ".jpg", ".jpeg", ".webp")
    files = sorted(path for path in folder.glob("[!.]*") if path.suffix.lower() in suffixes)  # no hidden files
    if len(files) < 2:
        raise RequestError(field=f"reference {folder}", found=f"{len(files)} images", expected="at least 2")
    rows = []
    for number, path in enumerate(files):
        progress("features of real images", number, len(files))
        with (
            convert_read_errors(path, "an image", RequestError, "remove it from the folder"),
            open_regular_file(path) as file,
        ):
            image = ImageOps.fit(open_image(file).convert("RGB"), image_size, Resampling.BICUBIC)
        rows.append(feature_model([image]))
    return np.concatenate(rows)


class EncoderFeatureModel(ImageFeatureModel):
    """Graph `vq_encoder` of a bundle, from whose output image features are computed.

    Each channel of the vectors before quantisation gives five features: its means in the quarters of the image, and its
    standard deviation over the image. So few features need only a few hundred images.
    """

    output_name = "pre_quant"

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        half = (0.5, 0.5, 0.5)
        super().__init__(bundle.path("vq_encoder"), Preprocessing(image_mean=half, image_std=half), threads)
        self.facts["name"] = "VQ encoder features"

    def _extract_vector_per_image(self, values: Floats, num_images: int) -> Floats:
        super()._extract_vector_per_image(values, num_images)  # Checks the shape.
        height = values.shape[2] // 2
        width = values.shape[3] // 2
        quarters = [quarter for half in np.split(values, [height], 2) for quarter in np.split(half, [width], 3)]
        return np.concatenate([*(quarter.mean((2, 3)) for quarter in quarters), values.std((2, 3))], 1)


class PromptAgreementModel(OnnxImageModel):
    """ONNX graph that measures the agreement of images with their prompts, such as CLIP.

    Besides images, the graph has an int64 input `[n, length]` of token ids, and perhaps an int64 attention mask. The
    first output is `[n]`, or `[n, n]` with a row per image and a column per prompt. Only the diagonal of `[n, n]` is
    used. Only prompts of equal length are in the same batch, because padding could change the result.

    A `tokenizer.json` in the graph's folder tokenizes prompts. Without this file, the word list of the bundle is used.
    """

    def __init__(self, path: Path, preprocessing: Preprocessing, bundle: Bundle, threads: int | None = None) -> None:
        super().__init__(path, "agreement", preprocessing, threads)
        texts = self.text_inputs
        if len(texts) not in (1, 2) or any(
            tensor.type != "tensor(int64)" or len(tensor.shape) != 2 for tensor in texts
        ):
            raise self._make_input_error(
                "one float input [n, 3, h, w], one int64 input [n, length], and optionally an int64 attention mask"
            )
        if "mask" in texts[0].name:
            texts = texts[::-1]
        self.names = [tensor.name for tensor in texts]  # Token ids and, if the graph has it, the mask.
        tokenizer = path.parent / TOKENIZER_FILE
        self.facts["tokenizer"] = TOKENIZER_FILE
        if not tokenizer.exists():
            if bundle.manifest.condition.kind != "words":  # Graphs cannot read ids of another model's text tokenizer.
                problem = f"bundle {bundle.manifest.name} has no word list"
                remedy = f"put the {TOKENIZER_FILE} that belongs to the graph beside it"
                raise RequestError(problem, field="agreement", remedy=remedy)
            tokenizer = bundle.path("tokenizer")
            self.facts["tokenizer"] = f"the tokenizer of {bundle.manifest.name}"
        with convert_read_errors(
            tokenizer, f"a {TOKENIZER_FILE}", RequestError, "put the one that belongs to the graph"
        ):
            self.tokenizer = parse_tokenizer(read_regular_file(tokenizer, _FILE_LIMIT), keeps_truncation=True)

    def __call__(self, images: Sequence[Image], prompts: Sequence[str]) -> Floats:
        """Return the agreement of each image with its prompt, float64 `[images]`; higher is better."""
        agreement = np.zeros(len(images))
        tokens = [np.array(self.tokenizer.encode(prompt).ids, np.int64) for prompt in prompts]
        lengths = np.array([len(ids) for ids in tokens])
        for length in np.unique(lengths):
            indices = np.flatnonzero(lengths == length).tolist()
            ids = np.stack([tokens[i] for i in indices])  # [images, length]
            texts = dict(zip(self.names, (ids, np.ones_like(ids)), strict=False))
            agreement[indices] = self._run_batches([images[i] for i in indices], texts)
        return agreement

    def _extract_vector_per_image(self, values: Floats, num_images: int) -> Floats:
        if values.shape not in ((num_images,), (num_images, num_images)):
            raise self._make_error(
                found=f"an output {list(values.shape)} of {num_images} images", expected="[n] or [n, n]"
            )
        return values.diagonal() if values.ndim == 2 else values
