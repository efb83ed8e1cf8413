"""Conversion of prompts, class ids and text embeddings to inputs of the condition graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bundle.conditions import ConditionSpec
from .bundle.files import Bundle
from .bundle.manifest import Manifest, Size
from .edits import ImageEdit
from .errors import RequestError
from .inputs import check_int, format_error, format_value
from .options import Embeddings
from .sources import SourceImage
from .text.tokenizers import CaptionTokenizer, TemplateTokenizer, load_tokenizer
from .text.words import WordTokenizer, read_word_tokenizer

Label = str | int | tuple[int, ...] | None
PromptTokenizer = WordTokenizer | CaptionTokenizer | TemplateTokenizer
# The model's tokens limit a prompt. Usual text has 3 to 5 characters per token, so a far longer text is not tokenized.
_CHARACTERS_PER_TOKEN = 16
_MIN_CHARACTERS = 2000  # allowed for every model: some models drop the last tokens of a long prompt
_MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True)
class ImageRequest:
    """Image to generate, with its prompt, seed and inputs of the condition graph.

    Attributes:
        prompt_or_class_id: prompt, class id or token ids, as the request states them; None for text embeddings.
        condition_inputs: inputs of the condition graph by name, `[1, ...]`.
        attention_masks: masks of the conditional and the unconditional row, bool `[prefix]`; False on padding.
        token_ids: token ids of the conditional and the unconditional row, int64 `[prefix]`; None unless text and image
            tokens share a vocabulary.
        seed: random seed, 0 .. 2**64 - 1.
        negative_request: request of the negative prompt, whose conditional row replaces the unconditional row. All
            images of a request share this object.
        edit: image to edit, or source image. All images of a request share this object.
        first_position: position of the image's first code; None: the prompt begins at position 0.
        position_ids: positions of the tokens in the conditional and the unconditional row, int64 `[prefix]`; None: the
            positions are consecutive.
    """

    prompt_or_class_id: Label
    condition_inputs: dict[str, NDArray[Any]]
    attention_masks: tuple[NDArray[np.bool_], NDArray[np.bool_]]
    token_ids: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    seed: int = 0
    negative_request: ImageRequest | None = None
    edit: ImageEdit | SourceImage | None = None
    first_position: int | None = None
    position_ids: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None


def load_bundle_tokenizer(bundle: Bundle) -> PromptTokenizer | None:
    """Load the tokenizer of a bundle; return None if the bundle takes no prompts."""
    condition = bundle.manifest.condition
    if condition.kind == "text":
        return CaptionTokenizer(load_tokenizer(bundle.path("tokenizer")), condition.cleaning)
    if condition.layout is not None:
        return TemplateTokenizer(load_tokenizer(bundle.path("tokenizer")), condition.layout.template)
    if condition.kind == "words":
        return replace(read_word_tokenizer(bundle.path("tokenizer")), example_prompts=tuple(bundle.example_prompts))
    return None


def _format_field_name(name: str, index: int, count: int) -> str:
    return name if count == 1 else f"{name} {index + 1} of {count}"


def build_class_requests(condition: ConditionSpec, class_ids: list[Any]) -> list[ImageRequest]:
    """Build a request for one image of each class id, or raise RequestError if an id is out of range."""
    ids = check_class_ids(class_ids, condition.classes or 1)
    real = np.ones(condition.prefix, np.bool_)  # no position is padding
    return [ImageRequest(i, {"class_ids": np.array([i], np.int64)}, (real, real)) for i in ids]


def check_class_ids(class_ids: list[Any], classes: int) -> list[int]:
    """Raise RequestError unless every class id is in `0 .. classes - 1`."""
    names = [_format_field_name("class id", i, len(class_ids)) for i in range(len(class_ids))]
    return [check_int(name, value, 0, 0, classes - 1) for name, value in zip(names, class_ids, strict=True)]


def build_prompt_requests(
    condition: ConditionSpec, tokenizer: PromptTokenizer, size: Size, prompts: list[Any], negative_prompt: Any = None
) -> list[ImageRequest]:
    """Build a request for one image of each prompt. Without negative prompt, the bundle's unconditional row is used."""
    return _add_negative_prompts(
        _build_text_requests("prompt", condition, tokenizer, size, prompts), condition, tokenizer, size, negative_prompt
    )


def build_token_id_requests(
    condition: ConditionSpec, tokenizer: PromptTokenizer, size: Size, prompts: list[Any], negative_prompt: Any = None
) -> list[ImageRequest]:
    """Build a request for one image of each prompt, where a prompt is a list of token ids.

    The ids must begin and end like the bundle's template, which for condition kind `tokens` contains the size.

    Args:
        prompts: token ids of one prompt, or one list of token ids per prompt, not checked yet.
    """
    rows = prompts if prompts and all(isinstance(row, list | tuple | np.ndarray) for row in prompts) else [prompts]
    names = [_format_field_name("token_ids", i, len(rows)) for i in range(len(rows))]
    requests = [
        _build_token_id_request(name, condition, tokenizer, size, row) for name, row in zip(names, rows, strict=True)
    ]
    return _add_negative_prompts(requests, condition, tokenizer, size, negative_prompt)


def _build_token_id_request(
    field_name: str, condition: ConditionSpec, tokenizer: PromptTokenizer, size: Size, prompt_ids: list[Any]
) -> ImageRequest:
    ids = [check_int(field_name, value, -1, 0, _MAX_TOKEN_ID) for value in prompt_ids]
    before, after = ((), ()) if condition.layout is None else condition.layout.surrounding_tokens(size.tokens)
    text = ids[len(before) : len(ids) - len(after)]
    if ids != [*before, *text, *after]:
        expected = f"{[*before]} before the text and {[*after]} after the text, as size {size.name} requires"
        raise RequestError(
            field=field_name, found=format_value(ids[: len(before)] + ids[-len(after) :]), expected=expected
        )
    if not text or len(ids) > condition.prefix:
        limits = f"{len(before) + 1 + len(after)} .. {condition.prefix:,}"
        raise RequestError(field=field_name, found=f"{len(ids):,} ids", expected=limits)
    if unknown := [i for i in text if not tokenizer.has_id(i)]:
        raise RequestError(field=field_name, found=f"{unknown[0]}", expected="ids of the bundle's tokenizer")
    # The condition graph of kind `words` reads ids of fixed length; other kinds read ids of any length.
    padded = text + [0] * (condition.prefix - len(text)) if condition.kind == "words" else text
    return _build_image_request(condition, size, tuple(ids), np.array(padded, np.int64))


def _add_negative_prompts(
    requests: list[ImageRequest], condition: ConditionSpec, tokenizer: PromptTokenizer, size: Size, negative_prompt: Any
) -> list[ImageRequest]:
    if negative_prompt is None:
        return requests
    if isinstance(tokenizer, TemplateTokenizer) and condition.layout and condition.layout.negative:
        tokenizer = replace(tokenizer, template=condition.layout.negative)
    # Only masks and ids are replaced here. `compute_prefixes` computes the embeddings once for all images.
    (negative_request,) = _build_text_requests("negative_prompt", condition, tokenizer, size, [negative_prompt])
    replaced = []
    for request in requests:
        token_ids = None
        if request.token_ids and negative_request.token_ids:
            token_ids = (request.token_ids[0], negative_request.token_ids[0])
        real = (request.attention_masks[0], negative_request.attention_masks[0])
        replaced.append(replace(request, attention_masks=real, token_ids=token_ids, negative_request=negative_request))
    return replaced


def _build_text_requests(
    field: str, condition: ConditionSpec, tokenizer: PromptTokenizer, size: Size, prompts: list[Any]
) -> list[ImageRequest]:
    if isinstance(tokenizer, TemplateTokenizer):
        tokenizer = tokenizer.fill_size(size.name)
    requests = []
    for i, prompt in enumerate(prompts):
        try:
            requests.append(_build_text_request(condition, tokenizer, size, prompt))
        except RequestError as error:
            error.field = _format_field_name(field, i, len(prompts))  # says which of several prompts is invalid
            if isinstance(tokenizer, WordTokenizer) and tokenizer.example_prompts:
                error.suggestions = tuple(tokenizer.find_nearest_examples(str(prompt)[:_MIN_CHARACTERS]))
                similar = f"similar valid prompts: {', '.join(map(repr, error.suggestions))}"
                error.remedy = "; ".join(filter(None, [error.remedy, similar]))
            raise
    return requests


def _build_text_request(condition: ConditionSpec, tokenizer: PromptTokenizer, size: Size, prompt: Any) -> ImageRequest:
    if not isinstance(prompt, str):
        raise RequestError(field="prompt", found=format_value(prompt), expected="text or a list of texts")
    max_characters = max(_MIN_CHARACTERS, _CHARACTERS_PER_TOKEN * condition.prefix)
    if len(prompt) > max_characters:
        raise RequestError(field="prompt", found=f"{len(prompt):,} characters", expected=f"at most {max_characters:,}")
    if not prompt.strip():
        raise RequestError(field="prompt", found="empty text", expected="a few words")
    # Python decodes bytes of command-line arguments that are not UTF-8 to surrogates.
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise RequestError(field="prompt", found=format_value(prompt), expected="text in UTF-8", remedy="type it again")
    layout = condition.layout
    before, after = ((), ()) if layout is None else layout.surrounding_tokens(size.tokens)
    text = prompt.strip() if layout is not None and layout.strip else prompt
    ids = tokenizer.encode(text, condition.prefix - len(before) - len(after))
    return _build_image_request(condition, size, prompt, ids)


def _build_image_request(
    condition: ConditionSpec, size: Size, prompt_or_class_id: Label, ids: NDArray[np.int64]
) -> ImageRequest:
    """Build the request from the ids of a prompt, int64 `[n]`, without the ids that the template adds."""
    layout = condition.layout
    prefix = condition.prefix
    if layout is None:
        real = np.arange(prefix) >= prefix - len(ids)  # the prefix is left-padded: its last positions are real
        mask = {"token_mask": np.ones((1, len(ids)), np.int64)} if condition.kind == "text" else {}
        return ImageRequest(prompt_or_class_id, {"token_ids": ids[None], **mask}, (real, real))
    before, after = layout.surrounding_tokens(size.tokens)
    cond = np.array([*before, *ids, *after], np.int64)
    uncond = cond.copy() if layout.uncond is None else np.array([*layout.uncond, *size.tokens], np.int64)
    if layout.uncond_fill is not None:
        uncond[len(before) : len(cond) - len(after)] = layout.uncond_fill  # replaces each id of the text
    condition_inputs = {"token_ids": cond[None], "uncond_ids": uncond[None]}
    rows = (np.ones(len(cond), bool), np.ones(len(uncond), bool))
    return ImageRequest(prompt_or_class_id, condition_inputs, rows, (cond, uncond), first_position=size.first_position)


def insert_source_image(request: ImageRequest, manifest: Manifest, size: Size, source: SourceImage) -> ImageRequest:
    """Insert the codes of a source image before the text of a prompt.

    A rotary position of the model has a time, a row and a column. Position p + s * `max_positions` is position p, moved
    back by s: s is subtracted from its time, row and column.

    A token at distance d before the first code of the new image has the position of this first code, moved back by d.
    The codes of the source have the positions of a new image with the source's size, all moved back by one distance.
    This distance is the longer side of the source, in cells, plus the number of ids between the source and the image.

    Args:
        size: size of the new images, the result of `Size.with_source_image`.
        source: source image. Its codes may be computed later, because the request has placeholders for them.
    """
    spec = manifest.source
    first = size.first_position
    assert spec is not None
    assert request.token_ids is not None
    assert first is not None
    text, uncond = request.token_ids
    source_size = source.size.with_source_image()
    cells = np.arange(source_size.codes)
    num_following = len(spec.after) + len(text)  # number of ids between the codes of the source and the new image
    distance = num_following + max(source_size.rows, source_size.columns)
    step_back = manifest.target.max_positions  # adding this to a position moves the position back by 1
    source_positions = (source_size.first_position or 0) + step_back * distance + cells

    def positions_before_image(count: int, distance: int) -> NDArray[np.int64]:
        """Return the positions of `count` tokens, with `distance` ids between the last one and the first code."""
        moved: NDArray[np.int64] = first + step_back * np.arange(distance + count, distance, -1)
        return moved

    # The zeros are placeholders, which `SourceImage.insert_source_codes` replaces by the codes of the source.
    ids = np.concatenate([spec.before, np.zeros_like(cells), spec.after, text]).astype(np.int64)
    position_ids = np.concatenate(
        [
            positions_before_image(len(spec.before), distance),
            source_positions,
            positions_before_image(num_following, 0),
        ]
    )
    return replace(
        request,
        condition_inputs={**request.condition_inputs, "token_ids": ids[None]},
        attention_masks=(np.ones(len(ids), np.bool_), request.attention_masks[1]),
        token_ids=(ids, uncond),
        position_ids=(position_ids, positions_before_image(len(uncond), 0)),
        edit=source,
    )


def _convert_to_numpy(values: Any) -> NDArray[Any]:
    if hasattr(values, "detach"):  # a PyTorch tensor; NumPy rejects tensors that need gradients, and bfloat16
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values
    return np.asarray(values)


def build_embedding_requests(condition: ConditionSpec, embeddings: Embeddings) -> list[ImageRequest]:
    """Build a request for one image of each text embedding, and move its padding from the right to the left."""
    prefix = condition.prefix
    width = condition.caption_dim or 0
    rows, mask = embeddings if isinstance(embeddings, tuple) else (embeddings, None)
    try:
        with np.errstate(over="ignore"):  # infinite values raise an error below
            values = _convert_to_numpy(rows).astype(np.float32, casting="same_kind")
        marks = np.ones(values.shape[:-1], np.bool_) if mask is None else _convert_to_numpy(mask).astype(np.bool_)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # PyTorch raises RuntimeError
        raise RequestError(
            field="embeddings", found=format_error(error), expected="an array of numbers and a mask"
        ) from error
    if values.ndim == 2:
        values = values[None]  # [prompts, tokens, dim]
        marks = marks[None]  # [prompts, tokens]
    fits = values.ndim == 3 and values.shape[0] > 0 and 1 <= values.shape[1] <= prefix and values.shape[2] == width
    if not fits or marks.shape != values.shape[:2]:
        actual = f"{list(values.shape)} with mask {list(marks.shape)}"
        expected = f"[prompts, tokens, {width}] with mask [prompts, tokens], where tokens is 1 .. {prefix}"
        raise RequestError(field="embeddings", found=actual, expected=expected)
    lengths = marks.sum(1)[:, None]  # number of tokens, [prompts, 1]
    if (lengths == 0).any() or not np.array_equal(marks, np.arange(marks.shape[1]) < lengths):
        expected = "at least one 1, then zeros (right-padded)"
        raise RequestError(field="embeddings", found="a mask with gaps", expected=expected)
    if not np.isfinite(values[marks]).all():
        raise RequestError(field="embeddings", found="NaN or infinity", expected="finite numbers")
    # The bundle format requires zeros as padding. The caller's padding may have any values, even NaN.
    left_padded = np.zeros((len(values), prefix, width), np.float32)
    real = np.arange(prefix) >= prefix - lengths  # [prompts, prefix]
    left_padded[real] = values[marks]
    return [
        ImageRequest(None, {"caption_embeds": value[None], "caption_mask": row[None].astype(np.int64)}, (row, row))
        for value, row in zip(left_padded, real, strict=True)
    ]
