"""Endpoint `POST /generate`, at which SGLang requests the codes (image tokens) of GLM-Image from another server.

A request has a prompt as token ids, two grids and sampling settings; a batch has a list of each. GLM-Image generates a
small grid of codes before the grid of the image, and the response has the codes in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator
from starlette.responses import JSONResponse, Response

from ..inputs import format_value
from ..methods import SAMPLING
from .codes import CodesRequest
from .protocol import Completion, HttpError, SamplingFields, parse_json_body

if TYPE_CHECKING:
    from ..bundle.files import Bundle

_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)
_Grid = Annotated[list[int], Field(min_length=3, max_length=3)]  # frames (1), rows, columns
_Ids = Annotated[list[int], Field(min_length=1), FailFast()]


class TokenPromptRequest(CodesRequest):
    """Request for the codes of one image, with a prompt that is already tokenized."""

    input_ids: list[int]  # with the ids of the prompt template
    grid_shapes: list[list[int]]  # [1, rows, columns] of the image, then of the small grid
    max_tokens: int  # at least the codes of both grids

    def adapt_to_bundle(self, bundle: Bundle) -> Self:
        sizes = [size for size in bundle.manifest.all_sizes if size.first_grid is not None]
        if not sizes:
            problem = f"model {bundle.manifest.name} does not generate a small grid before its image"
            raise HttpError(
                400, problem, field="image_data", remedy="make a bundle of GLM-Image the first model of the server"
            )
        by_grids = {str([[1, size.rows, size.columns], [1, *(size.first_grid or ())]]): size for size in sizes}
        size = by_grids.get(str(self.grid_shapes))
        if size is None:
            expected = f"the grids of {', '.join(size.name for size in sizes)}, such as {next(iter(by_grids))}"
            raise HttpError(400, field="image_grid_thw", found=format_value(self.grid_shapes), expected=expected)
        if self.max_tokens < size.codes:
            raise HttpError(400, field="max_new_tokens", found=f"{self.max_tokens}", expected=f"at least {size.codes}")
        return self.model_copy(update={"size": size.name})


class _SamplingParameters(SamplingFields):
    model_config = _STRICT

    max_new_tokens: Annotated[int, Field(ge=1)]
    ignore_eos: Literal[True] | None = None  # the model never samples the end
    sampling_seed: Annotated[int, Field(ge=0)] | None = None


class _ImageData(BaseModel):
    model_config = _STRICT

    image_grid_thw: Annotated[list[_Grid], Field(min_length=1, max_length=8)]


_Images = Annotated[list[_ImageData], Field(min_length=1, max_length=1)]


class _SingleRequestBody(BaseModel):
    model_config = _STRICT

    input_ids: _Ids
    image_data: _Images
    sampling_params: _SamplingParameters


class _BatchRequestBody(BaseModel):
    """Body of a request for several images: lists with one element per image."""

    model_config = _STRICT

    input_ids: Annotated[list[_Ids], Field(min_length=1), FailFast()]
    image_data: list[_Images]
    sampling_params: list[_SamplingParameters]

    @model_validator(mode="after")
    def _check_equal_list_lengths(self) -> _BatchRequestBody:
        if not len(self.input_ids) == len(self.image_data) == len(self.sampling_params):
            raise ValueError("the lists input_ids, image_data and sampling_params must have the same length")
        return self


@dataclass(frozen=True)
class SGLangRequest:
    """Parsed request of SGLang; the response to a batch is a list."""

    generation_requests: Sequence[TokenPromptRequest]
    is_batch: bool

    def make_response(self, completions: Sequence[Completion]) -> Response:
        images = [_make_image_result(completion) for completion in completions]
        return JSONResponse(images if self.is_batch else images[0])


def _make_image_result(completion: Completion) -> dict[str, Any]:
    generation_stats = completion.generation_stats
    counts = {"prompt_tokens": completion.input_tokens, "completion_tokens": completion.output_tokens}
    meta_info = {
        **counts,
        "cached_tokens": 0,
        "sampling_seed": generation_stats.seeds[0],
        "lantern": asdict(generation_stats),
    }
    return {"output_ids": completion.codes[0].tolist(), "meta_info": meta_info}


def parse_sglang_body(body: bytes) -> SGLangRequest:
    """Parse the body of a single request or of a batch."""
    match parse_json_body(_InputIdsBody, body).input_ids:
        case [list(), *_]:
            batch = parse_json_body(_BatchRequestBody, body)
            columns = zip(batch.input_ids, batch.image_data, batch.sampling_params, strict=True)
            return SGLangRequest([_make_request(*values) for values in columns], is_batch=True)
    single = parse_json_body(_SingleRequestBody, body)
    request = _make_request(single.input_ids, single.image_data, single.sampling_params)
    return SGLangRequest([request], is_batch=False)


def _make_request(input_ids: _Ids, images: _Images, parameters: _SamplingParameters) -> TokenPromptRequest:
    return TokenPromptRequest(
        input_ids=input_ids,
        grid_shapes=images[0].image_grid_thw,
        max_tokens=parameters.max_new_tokens,
        seed=parameters.sampling_seed,
        **{name: getattr(parameters, name) for name in SAMPLING},
    )


class _InputIdsBody(BaseModel):
    input_ids: Any
