"""What images are made from: prompts, class ids or text embeddings, as the condition graph reads them.

The prefix rows of an embeddings bundle are laid out here: right-padded in requests, left-padded in the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bundle.files import Bundle
from .bundle.manifest import ConditionSpec, Size
from .edits import Edit
from .errors import RequestError
from .inputs import check_int, format_error, format_value
from .methods import Embeddings
from .text.tokenizers import CaptionTokenizer, TemplateTokenizer, load_tokenizer
from .text.words import WordTokenizer, read_word_tokenizer

Label = str | int | None
PromptTokenizer = WordTokenizer | CaptionTokenizer | TemplateTokenizer
PROMPT_LIMIT = 2000  # characters


@dataclass(frozen=True)
class ImageRequest:
    """One image: its label (prompt, class id, or None), its seed, and what the condition graph reads.

    inputs: by name, `[1, ...]`. real: of the conditional and the unconditional row, bool `[prefix]`, False on padding.
    tokens: ids of both rows, where prompts are made of them. negative: of the negative prompt, if there is one, whose
    conditional row takes the place of the unconditional one; the same object for all images of a request. edit: the
    picture of which a part is drawn anew, if there is one; the same object, too.
    """

    label: Label
    inputs: dict[str, NDArray[Any]]
    real: tuple[NDArray[np.bool_], NDArray[np.bool_]]
    tokens: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    seed: int = 0
    negative: ImageRequest | None = None
    edit: Edit | None = None


def load_bundle_tokenizer(bundle: Bundle) -> PromptTokenizer | None:
    """The tokenizer of a bundle that takes prompts."""
    condition = bundle.manifest.condition
    if condition.kind == "text":
        return CaptionTokenizer(load_tokenizer(bundle.path("tokenizer")), condition.cleaning)
    if condition.layout is not None:
        return TemplateTokenizer(load_tokenizer(bundle.path("tokenizer")), condition.layout.template)
    if condition.kind == "words":
        return replace(read_word_tokenizer(bundle.path("tokenizer")), examples=tuple(bundle.examples))
    return None


def _nth(name: str, i: int, count: int) -> str:
    return name if count == 1 else f"{name} {i + 1} of {count}"


def prepare_class_ids(condition: ConditionSpec, class_ids: list[Any]) -> list[ImageRequest]:
    """What is made of every class id. Raises: RequestError: one is out of range."""
    last = (condition.classes or 1) - 1
    ids = [check_int(_nth("class id", i, len(class_ids)), one, 0, 0, last) for i, one in enumerate(class_ids)]
    real = np.ones(condition.prefix, np.bool_)
    return [ImageRequest(i, {"class_ids": np.array([i], np.int64)}, (real, real)) for i in ids]


def prepare_prompts(
    condition: ConditionSpec, tokenizer: PromptTokenizer, size: Size, prompts: list[Any], negative: Any = None
) -> list[ImageRequest]:
    """What is made of every prompt and of the negative one, if any; a refusal says which one it is of."""
    requests = _prepare_prompts("prompt", condition, tokenizer, size, prompts)
    if negative is None:
        return requests
    if isinstance(tokenizer, TemplateTokenizer) and condition.layout and condition.layout.negative:
        tokenizer = replace(tokenizer, template=condition.layout.negative)
    (other,) = _prepare_prompts("negative_prompt", condition, tokenizer, size, [negative])
    return [
        replace(
            one,
            real=(one.real[0], other.real[0]),
            tokens=one.tokens and other.tokens and (one.tokens[0], other.tokens[0]),
            negative=other,
        )
        for one in requests
    ]


def _prepare_prompts(
    field: str, condition: ConditionSpec, tokenizer: PromptTokenizer, size: Size, prompts: list[Any]
) -> list[ImageRequest]:
    if isinstance(tokenizer, TemplateTokenizer):
        tokenizer = tokenizer.for_size(size.name)
    requests = []
    for i, prompt in enumerate(prompts):
        try:
            requests.append(_prepare_prompt(condition, tokenizer, size, prompt))
        except RequestError as error:
            error.field = _nth(field, i, len(prompts))
            if near := tokenizer.nearest_examples(prompt) if isinstance(tokenizer, WordTokenizer) else []:
                error.remedy = "; ".join(filter(None, [error.remedy, f"it draws {', '.join(map(repr, near))}"]))
            raise
    return requests


def _prepare_prompt(condition: ConditionSpec, tokenizer: PromptTokenizer, size: Size, prompt: Any) -> ImageRequest:
    if not isinstance(prompt, str):
        raise RequestError(field="prompt", found=format_value(prompt), expected="text or a list of texts")
    if not prompt.strip():
        raise RequestError(field="prompt", found="an empty one", expected="a few words")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):  # how Python passes on bytes of arguments
        raise RequestError(field="prompt", found=format_value(prompt), expected="text in UTF-8", remedy="type it again")
    if len(prompt) > PROMPT_LIMIT:
        raise RequestError(field="prompt", found=f"{len(prompt):,} characters", expected=f"at most {PROMPT_LIMIT:,}")
    layout, prefix = condition.layout, condition.prefix
    if layout is None:
        ids = tokenizer.encode(prompt, prefix)
        real = np.arange(prefix) >= prefix - len(ids)
        mask = {"token_mask": np.ones((1, len(ids)), np.int64)} if condition.kind == "text" else {}
        return ImageRequest(prompt, {"token_ids": ids[None], **mask}, (real, real))
    behind = (*layout.after, *size.tokens)
    ids = tokenizer.encode(prompt, prefix - len(layout.before) - len(behind))
    cond = np.array([*layout.before, *ids, *behind], np.int64)
    uncond = cond.copy() if layout.uncond is None else np.array([*layout.uncond, *size.tokens], np.int64)
    if layout.uncond_fill is not None:
        uncond[len(layout.before) : len(cond) - len(behind)] = layout.uncond_fill
    inputs = {"token_ids": cond[None], "uncond_ids": uncond[None]}
    return ImageRequest(prompt, inputs, (np.ones(len(cond), bool), np.ones(len(uncond), bool)), (cond, uncond))


def _array(values: Any) -> NDArray[Any]:
    if hasattr(values, "detach"):  # a tensor of PyTorch, which NumPy reads without gradients, and in no bfloat16
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values
    return np.asarray(values)


def prepare_embeddings(condition: ConditionSpec, embeddings: Embeddings) -> list[ImageRequest]:
    """Left-pad right-padded embeddings: real rows go to the end, padding becomes zero."""
    prefix, width = condition.prefix, condition.caption_dim or 0
    rows, mask = embeddings if isinstance(embeddings, tuple) else (embeddings, None)
    try:
        with np.errstate(over="ignore"):  # what is infinite then is refused below
            values = _array(rows).astype(np.float32, casting="same_kind")
        marks = np.ones(values.shape[:-1], np.bool_) if mask is None else _array(mask).astype(np.bool_)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # RuntimeError: of PyTorch
        raise RequestError(
            field="embeddings", found=format_error(error), expected="an array of numbers and a mask"
        ) from error
    if values.ndim == 2:
        values, marks = values[None], marks[None]
    fits = values.ndim == 3 and values.shape[0] > 0 and 1 <= values.shape[1] <= prefix and values.shape[2] == width
    if not fits or marks.shape != values.shape[:2]:
        found = f"{list(values.shape)} with mask {list(marks.shape)}"
        expected = f"[prompts, 1 .. {prefix}, {width}] with mask [prompts, the same]"
        raise RequestError(field="embeddings", found=found, expected=expected)
    lengths = marks.sum(1)[:, None]
    if (lengths == 0).any() or not np.array_equal(marks, np.arange(marks.shape[1]) < lengths):
        expected = "ones, at least one, then zeros (right-padded)"
        raise RequestError(field="embeddings", found="a mask with gaps", expected=expected)
    if not np.isfinite(values[marks]).all():
        raise RequestError(field="embeddings", found="NaN or infinity", expected="finite numbers")
    left, real = np.zeros((len(values), prefix, width), np.float32), np.arange(prefix) >= prefix - lengths
    left[real] = values[marks]
    return [
        ImageRequest(None, {"caption_embeds": value[None], "caption_mask": own[None].astype(np.int64)}, (own, own))
        for value, own in zip(left, real, strict=True)
    ]
