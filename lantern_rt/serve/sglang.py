"""Protocol by which SGLang asks another server for the codes of GLM-Image, `POST /generate`.

A call has a prompt as token ids, the grid of the image with the small grid that is drawn before it, and sampling
settings; or a list of each. The answer holds the codes of the small grid, then the codes of the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import JSONResponse, Response

from ..inputs import format_value
from ..methods import SAMPLING
from .codes import CodesRequest
from .protocol import Completion, HttpError, SamplingFields, read_json

if TYPE_CHECKING:
    from ..bundle.files import Bundle

_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)
_Grid = Annotated[list[int], Field(min_length=3, max_length=3)]  # frames (1), rows, columns
_Ids = Annotated[list[int], Field(min_length=1)]


class TokensRequest(CodesRequest):
    """Request for the codes of one image.

    Args:
        token_ids: token ids of the prompt, the template included.
        grids: the grid of the image and its small grid, each as 1, rows, columns.
        max_tokens: maximum number of ids in the answer.
    """

    token_ids: list[int]
    grids: list[list[int]]
    max_tokens: int

    def options(self) -> dict[str, Any]:
        return super().options() | {"token_ids": self.token_ids}

    def fit(self, bundle: Bundle) -> Self:
        sizes = [size for size in bundle.manifest.all_sizes if size.first_grid is not None]
        if not sizes:
            problem = f"model {bundle.manifest.name} does not draw a small grid before its image"
            raise HttpError(400, problem, field="image_data", remedy="serve a bundle of GLM-Image first")
        by_grids = {str([[1, size.rows, size.columns], [1, *(size.first_grid or ())]]): size for size in sizes}
        size = by_grids.get(str(self.grids))
        if size is None:
            expected = f"the grids of {', '.join(size.name for size in sizes)}, such as {next(iter(by_grids))}"
            raise HttpError(400, field="image_grid_thw", found=format_value(self.grids), expected=expected)
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


class _SingleBody(BaseModel):
    model_config = _STRICT

    input_ids: _Ids
    image_data: _Images
    sampling_params: _SamplingParameters

    def request(self, own_sampling: bool) -> TokensRequest:
        parameters = self.sampling_params
        sampling = {} if own_sampling else {name: getattr(parameters, name) for name in SAMPLING}
        return TokensRequest(
            token_ids=self.input_ids,
            grids=self.image_data[0].image_grid_thw,
            max_tokens=parameters.max_new_tokens,
            seed=parameters.sampling_seed,
            **sampling,
        )


class _BatchBody(BaseModel):
    model_config = _STRICT

    input_ids: Annotated[list[_Ids], Field(min_length=1)]
    image_data: list[_Images]
    sampling_params: list[_SamplingParameters]

    @model_validator(mode="after")
    def _same_length(self) -> _BatchBody:
        if not len(self.input_ids) == len(self.image_data) == len(self.sampling_params):
            raise ValueError("lists of different lengths: input_ids, image_data and sampling_params need one length")
        return self


@dataclass(frozen=True)
class GenerateCall:
    """Call of SGLang. batch: whether it holds lists, so that the answer is a list."""

    parts: Sequence[TokensRequest]
    batch: bool

    def response(self, completions: Sequence[Completion]) -> Response:
        """Return the ids of each image, with its costs in `meta_info`."""
        images = [_image_fields(completion) for completion in completions]
        return JSONResponse(images if self.batch else images[0])


def _image_fields(completion: Completion) -> dict[str, Any]:
    figures = completion.figures
    counts = {"prompt_tokens": completion.input_tokens, "completion_tokens": completion.output_tokens}
    meta_info = {**counts, "cached_tokens": 0, "sampling_seed": figures.seeds[0], "lantern": asdict(figures)}
    return {"output_ids": completion.codes[0].tolist(), "meta_info": meta_info}


def read_call(body: bytes, own_sampling: bool) -> GenerateCall:
    """Parse the body of a call.

    Args:
        body: JSON text.
        own_sampling: whether the sampling settings of the bundle replace the settings of the call.

    Raises:
        HttpError: a field is invalid.
    """
    head = read_json(_BodyHead, body)
    if not isinstance(head.input_ids, list) or not head.input_ids or not isinstance(head.input_ids[0], list):
        return GenerateCall([read_json(_SingleBody, body).request(own_sampling)], batch=False)
    batch = read_json(_BatchBody, body)
    columns = zip(batch.input_ids, batch.image_data, batch.sampling_params, strict=True)
    singles = [_SingleBody(input_ids=ids, image_data=data, sampling_params=values) for ids, data, values in columns]
    return GenerateCall([single.request(own_sampling) for single in singles], batch=True)


class _BodyHead(BaseModel):
    input_ids: Any
