"""Parts of a request: the words for them, the prefix that they become, and the classes that every kind implements.

The subject is what an image is made from: a prompt, a class id, token ids or text embeddings. Other inputs take part
beside it, such as an image to edit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from numpy.typing import NDArray
from PIL.Image import Image

from ..bundle.conditions import ConditionSpec
from ..bundle.manifest import Manifest, Size
from ..errors import RequestError
from ..inputs import convert_to_list
from ..output.names import make_slug
from ..runtime.engine import Bools, Floats, Ints
from ..runtime.state import PrefixRow
from ..text.prompt_tokenizer import PromptTokenizer

Label = str | int | tuple[int, ...] | None


@dataclass(frozen=True)
class Option:
    """Option of a command, whose name has underscores. `read` converts its value, such as a path, for the pipeline."""

    name: str
    type: Any
    metavar: str | None
    help: str
    read: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Words:
    """Names of one parameter of a pipeline call wherever users meet it, and the forms of its value there."""

    parameter: str  # name in Python
    field: str  # name in HTTP bodies
    chunk: str  # text chunk that records the value in PNG files; empty: the chunk of another parameter records it
    option: Option
    json_type: Any = None  # of the field that every JSON body has; None: the body of an endpoint declares the field
    chunk_type: Any = str  # of the text chunk, for pydantic
    # Converts a valid text chunk to the value of the parameter; RequestError if it records only a hash.
    restore: Callable[[Any], Any] = lambda value: value
    needs_text: bool = False  # whether the parameter can only stand beside a text


@dataclass(frozen=True)
class Row:
    """One batch row of a prefix, before the condition graph computes its embeddings."""

    inputs: Mapping[str, NDArray[Any]]  # of the condition graph, [1, ...]; rows with the same object share a run of it
    output: int  # index of the graph's output for this row: 0 `prefix_embeds`, 1 `uncond_embeds`
    is_real_token: Bools  # False on padding, [prefix]
    tokens: Ints | None = None  # int64 [prefix]; None unless text and image tokens share a vocabulary
    positions: Ints | None = None  # of the tokens, int64 [prefix]; None: consecutive
    first_position: int | None = None  # of the image's first code; None: the prefix begins at position 0

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
    """What the parts of a request are checked against. A source image changes `condition` and `size`."""

    condition: ConditionSpec
    tokenizer: PromptTokenizer | None  # None: the bundle takes no prompts
    size: Size
    uses_guidance: bool

    @property
    def template_tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids before and after those of the text in a conditional row."""
        layout = self.condition.layout
        return ((), ()) if layout is None else layout.surrounding_tokens(self.size.tokens)


@dataclass(frozen=True, eq=False)
class Subject(ABC):
    """What an image is made from, checked against a bundle. All images of one prompt share the object."""

    words: ClassVar[Words]
    conditions: ClassVar[frozenset[str]]  # kinds of conditions, as in the manifest, that take the subject
    description: ClassVar[str]  # in errors
    item_name: ClassVar[str]  # in errors, of one of several
    title: ClassVar[str]  # in reports and file names: format of an item and its index, from 0
    remedy: ClassVar[str] = ""  # in the error of a prompt that is given instead

    label: Label  # prompt, class id or token ids, as `Result.prompts` has it; None for text embeddings
    prefix: Prefix  # of the subject alone

    @classmethod
    def join(cls, items: Sequence[Any]) -> Any:
        """Return the value of the parameter for one item per prompt."""
        return list(items)

    @classmethod
    def name_items(cls, value: Any) -> list[tuple[str, Any]]:
        """Return one item per prompt of a parameter's value, each with its name for errors."""
        items = convert_to_list(value)
        names = [f"{cls.item_name} {i + 1} of {len(items)}" for i in range(len(items))]
        return list(zip(names if len(items) > 1 else [cls.item_name], items, strict=bool(items)))

    @classmethod
    def read(cls, value: Any, context: RequestContext) -> list[Self]:
        """Check the value of the parameter, and return one subject per prompt."""
        return [cls.make(item, name, context) for name, item in cls.name_items(value)]

    @classmethod
    @abstractmethod
    def make(cls, item: Any, name: str, context: RequestContext) -> Self:
        """Check the item of one prompt. `name`: field of errors."""

    def name(self, index: int) -> Any:
        """Return the label, or the index of the prompt if there is none."""
        return index if self.label is None else self.label

    def make_file_stem(self, index: int, option: Any) -> str:
        """Return the first part of a file's name. `option`: value of the option of `run`."""
        return make_slug(self.title.format(item=self.label, index=index))

    @property
    def record(self) -> str:
        """Text of the recipe's chunk."""
        return str(self.label)


class Part:
    """What takes part in a request beside the subject. All images of a request share the object.

    `read` makes it and `finish` completes it. A method that a kind does not implement changes nothing.
    """

    words: ClassVar[tuple[Words, ...]]
    preserved_codes: Ints | None = None  # codes of cells that are not generated, -1 in other cells, int64 `[cells]`

    @classmethod
    def read(cls, inputs: Mapping[str, Any], manifest: Manifest) -> Self:
        """Read the part from the parameters of a request, of which at least one is in `words`, with quick checks.

        The default gives the constructor the value, or None, of each parameter in `words`.
        """
        make: Callable[..., Self] = cls
        return make(*(inputs.get(words.parameter) for words in cls.words))

    def default_options(self) -> Mapping[str, Any]:
        """Return options that hold unless the request names them."""
        return {}

    def read_recorded_texts(self) -> Mapping[Any, Any]:
        """Return text chunks from which a request without a subject takes it."""
        return {}

    def adapt(self, context: RequestContext) -> RequestContext:
        """Change what the subject is checked against."""
        return context

    def finish(self, context: RequestContext) -> Part:
        """Check the rest, which may take long. The methods below belong to the result."""
        return self

    def change_prefix(self, prefix: Prefix) -> Prefix:
        return prefix

    def encode(self, encoder: Callable[[Floats], Ints]) -> None:
        """Compute codes of an image; a second call has no effect.

        Args:
            encoder: converts pixels in -1 .. 1, float32 `[1, 3, height, width]`, to codes, int64 `[1, cells]`.
        """

    def finish_image(self, image: Image) -> Image:
        """Change the pixels of a generated image."""
        return image

    @property
    def record(self) -> Mapping[str, str]:
        """Chunks of the recipe, by name."""
        return {}


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


def make_missing_guidance_error(field: str) -> RequestError:
    remedy = "omit it, or give a larger cfg_scale"
    return RequestError("does nothing without guidance", field=field, found="cfg_scale 1", remedy=remedy)
