"""Parts of a request: the words for them, the prefix that they become, and the classes that every kind implements.

The subject is what an image is made from: a prompt, a class id, token ids or text embeddings. Other inputs take part
beside it, such as an image to edit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from ..bundle.conditions import ConditionSpec
from ..bundle.manifest import Manifest, Size
from ..errors import RequestError
from ..runtime.engine import Bools, Floats, Ints
from ..runtime.state import PrefixRow
from ..text.prompt_tokenizer import PromptTokenizer

Label = str | int | tuple[int, ...] | None


@dataclass(frozen=True)
class Words:
    """Names of one parameter of a pipeline call wherever users meet it, and the forms of its value there.

    Attributes:
        parameter: name in Python.
        option: name on the command line, with underscores.
        field: name in HTTP bodies.
        chunk: name of the text chunk that records the value in PNG files; empty: another parameter's chunk records it.
        option_type: type of the value of the option of `run`; None: `run` has no such option.
        metavar: name of the option's value in help.
        help: help of the option.
        json_type: type of the field that every JSON body has; None: the body of an endpoint declares the field.
        chunk_type: type of the text chunk, for pydantic.
        read_option: converts the value of the option, such as a path, to the value of the parameter.
        restore: converts a valid text chunk to the value of the parameter; RequestError if it records only a hash.
        needs_text: whether the parameter can only stand beside a text.
    """

    parameter: str
    option: str
    field: str
    chunk: str = ""
    option_type: Any = None
    metavar: str | None = None
    help: str = ""
    json_type: Any = None
    chunk_type: Any = str
    read_option: Callable[[Any], Any] = lambda value: value
    restore: Callable[[Any], Any] = lambda value: value
    needs_text: bool = False


@dataclass(frozen=True)
class Row:
    """One batch row of a prefix, before the condition graph computes its embeddings.

    Attributes:
        inputs: inputs of the condition graph by name, `[1, ...]`. Rows with the same object share a run of the graph.
        output: index of the graph's output for this row: 0 `prefix_embeds`, 1 `uncond_embeds`.
        is_real_token: bool `[prefix]`; False on padding.
        tokens: token ids, int64 `[prefix]`; None unless text and image tokens share a vocabulary.
        positions: positions of the tokens, int64 `[prefix]`; None: the positions are consecutive.
        first_position: position of the image's first code; None: the prefix begins at position 0.
    """

    inputs: Mapping[str, NDArray[Any]]
    output: int
    is_real_token: Bools
    tokens: Ints | None = None
    positions: Ints | None = None
    first_position: int | None = None

    def embed(self, embeds: Floats) -> PrefixRow:
        """Return the row with its embeddings, float32 `[prefix, hidden_size]`."""
        return PrefixRow(embeds, self.is_real_token, self.tokens, self.positions, self.first_position)


class Prefix(NamedTuple):
    """Conditional and unconditional row of the positions before an image. The rows may differ in length."""

    cond: Row
    uncond: Row

    @property
    def length(self) -> int:
        return max(len(row.is_real_token) for row in self)


@dataclass(frozen=True)
class RequestContext:
    """What the parts of a request are checked against: the bundle, and what is already known of the request.

    Attributes:
        condition: condition of the bundle, without the prefix positions of a source image.
        tokenizer: tokenizer of the bundle; None: the bundle takes no prompts.
        size: image size, which a source image adapts.
        uses_guidance: whether the images are sampled with guidance.
    """

    condition: ConditionSpec
    tokenizer: PromptTokenizer | None
    size: Size
    uses_guidance: bool

    def require_tokenizer(self) -> PromptTokenizer:
        assert self.tokenizer is not None
        return self.tokenizer


@dataclass(frozen=True, eq=False)
class Subject(ABC):
    """What an image is made from, checked against a bundle. All images of one prompt share the object.

    Attributes:
        label: prompt, class id or token ids, as `Result.prompts` has it; None for text embeddings.
        prefix: prefix of the subject alone.
    """

    words: ClassVar[Words]
    conditions: ClassVar[frozenset[str]]  # kinds of conditions, as in the manifest, that take the subject
    description: ClassVar[str]  # in error messages
    item_name: ClassVar[str]  # one of several, in error messages
    is_text: ClassVar[bool] = True
    remedies: ClassVar[Mapping[str, str]] = {}  # what helps if another parameter is given instead

    label: Label
    prefix: Prefix

    @classmethod
    def split(cls, value: Any) -> list[Any]:
        """Return one item per prompt of a parameter's value."""
        return convert_to_list(value)

    @classmethod
    def join(cls, items: Sequence[Any]) -> Any:
        """Return the value of the parameter for several prompts, from one item per prompt."""
        return list(items)

    @classmethod
    def read(cls, value: Any, context: RequestContext) -> list[Self]:
        """Check the value of the parameter, and return one subject per prompt."""
        return [cls.make(item, name, context) for name, item in cls.name_items(value)]

    @classmethod
    def name_items(cls, value: Any) -> list[tuple[str, Any]]:
        """Return one item per prompt, each with its name for errors, which counts from 1 if there are several."""
        items = cls.split(value)
        names = [f"{cls.item_name} {i + 1} of {len(items)}" for i in range(len(items))]
        return list(zip(names if len(items) > 1 else [cls.item_name], items, strict=bool(items)))

    @classmethod
    @abstractmethod
    def make(cls, item: Any, name: str, context: RequestContext) -> Self:
        """Check the item of one prompt. `name`: field of errors."""

    @classmethod
    def describe_item(cls, item: Any, index: int) -> str:
        """Return the name of an item in reports; `index` counts from 0."""
        return str(item)

    @classmethod
    def list_records(cls, value: Any) -> list[Any]:
        """Return, for each prompt of a value, what a training shard records of it, as JSON."""
        return list(value)

    @property
    def record(self) -> str:
        """Text of the recipe's chunk."""
        return str(self.label)

    def json_value(self, index: int) -> Any:
        """Return what the JSON output of `run` has of the prompt with an index."""
        return self.label

    @abstractmethod
    def file_stem(self, index: int, option: Any) -> str:
        """Return the first part of a file's name, from the prompt's index and the value of the option of `run`."""


class Part(ABC):
    """What takes part in a request beside the subject. All images of a request share the object.

    A method that a kind does not implement changes nothing.
    """

    preserved_codes: Ints | None = None  # codes of cells that are not generated, -1 in other cells, int64 `[cells]`

    def change_prefix(self, prefix: Prefix) -> Prefix:
        return prefix

    def encode(self, encoder: Callable[[Floats], Ints]) -> None:  # noqa: B027
        """Compute codes of an image; a second call has no effect.

        Args:
            encoder: converts pixels in -1 .. 1, float32 `[1, 3, height, width]`, to codes, int64 `[1, cells]`.
        """

    def finish_image(self, image: Image) -> Image:
        """Change the pixels of a generated image."""
        return image

    @property
    @abstractmethod
    def record(self) -> Mapping[str, str]:
        """Chunks of the recipe, by name."""


class PartInput(ABC):
    """Values of a part in a request, of which only what is quick is checked yet.

    A method that a kind does not implement changes nothing.
    """

    words: ClassVar[tuple[Words, ...]]

    @classmethod
    @abstractmethod
    def read(cls, inputs: Mapping[str, Any], manifest: Manifest) -> Self | None:
        """Read the part from the parameters of a request; None: the request has no such part."""

    def default_options(self) -> Mapping[str, Any]:
        """Return options that hold unless the request names them."""
        return {}

    def read_recorded_texts(self) -> Mapping[Any, Any]:
        """Return text chunks from which a request without a subject takes it."""
        return {}

    def adapt(self, context: RequestContext) -> RequestContext:
        """Change what the subject is checked against."""
        return context

    @abstractmethod
    def finish(self, context: RequestContext) -> Part:
        """Check the rest, which may take long."""


@dataclass(frozen=True)
class ImageRequest:
    """Image to generate. `seed`: 0 .. 2**64 - 1."""

    subject: Subject
    parts: tuple[Part, ...] = ()
    seed: int = 0

    @property
    def prefix(self) -> Prefix:
        """Prefix of the subject and all parts. Codes of images are 0 before `Part.encode`."""
        prefix = self.subject.prefix
        for part in self.parts:
            prefix = part.change_prefix(prefix)
        return prefix

    @property
    def preserved_codes(self) -> Ints | None:
        return next((part.preserved_codes for part in self.parts if part.preserved_codes is not None), None)

    @property
    def record(self) -> dict[str, str]:
        """Chunks of the recipe, by name."""
        chunks = {self.subject.words.chunk: self.subject.record}
        for part in self.parts:
            chunks |= part.record
        return chunks


def convert_numpy_value(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def convert_to_list(value: Any, repeat_count: int = 1) -> list[Any]:
    """Return the items of a list or array; a single value, such as a text, `repeat_count` times."""
    value = convert_numpy_value(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value] * repeat_count


def make_missing_guidance_error(field: str) -> RequestError:
    remedy = "omit it, or give a larger cfg_scale"
    return RequestError("does nothing without guidance", field=field, found="cfg_scale 1", remedy=remedy)
