"""Requests, responses, events and errors of OpenAI's Images API, with the fields that lantern-rt adds."""

from __future__ import annotations

import asyncio
import base64
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from starlette.responses import JSONResponse, Response

from ..bundle.manifest import Size
from ..errors import BusyError, LanternError, RequestError
from ..hints import suggest_name
from ..inputs import UNKNOWN_FIELD, describe_validation_error
from ..methods import METHODS_BY_PARAMETER, SAMPLING, Quality
from ..output.formats import IMAGE_FORMATS, ImageFormat
from ..requests import choose_random_seed
from ..subjects.table import PARAMETER_NAMES, WORDS, list_subjects
from ..text.words import ANY_WORDS, ANY_WORDS_SERVED

if TYPE_CHECKING:
    from ..asynchronous import AsyncPipeline
    from ..bundle.files import Bundle
    from ..prepared import PreparedRequest
    from ..results import Ints, StreamStep

MAX_PARTIAL_IMAGES = 64
# Presets for the values of OpenAI's field `quality`, which may also be the name of a preset.
_PRESETS = {"low": "fast", "medium": "balanced", "high": "strict", "hd": "strict"}
_PRESETS |= {name: name for name in get_args(Quality)}
# Values of the field `quality` in responses, where they differ from the request's.
_OPENAI_QUALITIES = {"hd": "high", "standard": "auto", "strict": "high", "balanced": "medium", "fast": "low"}

Event = dict[str, Any]  # one event of a stream; `type` names its kind

if TYPE_CHECKING:
    SamplingFields = BaseModel
    InputFields = BaseModel
else:
    SamplingFields = create_model(
        "SamplingFields",
        **{
            name: (Annotated[field.annotation, *field.metadata] | None, Field(None, description=field.description))
            for name, field in SAMPLING.items()
        },
    )
    InputFields = create_model(
        "InputFields",
        __base__=SamplingFields,
        **{words.field: (words.json_type | None, None) for words in WORDS.values() if words.json_type},
    )


class GenerationRequest(InputFields):
    """Request with the fields that all endpoints share. Subclasses add fields and convert images to a response."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=10)] | None = None
    size: str | None = None
    stream: bool | None = None
    quality: Literal["auto", "standard", "low", "medium", "high", "hd", "strict", "balanced", "fast"] | None = None
    user: str | None = None
    # Fields that lantern-rt adds.
    seed: int | None = None
    method: str | None = None
    quality_budget: Quality | None = None
    deadline: Annotated[float, Field(gt=0)] | None = None
    steps: bool | None = None

    EVENT_PREFIX: ClassVar[str]  # first part of the `type` of events other than `lantern.step`

    @property
    def generation_requests(self) -> list[GenerationRequest]:
        """Requests whose images are generated at the same time."""
        return [self]

    @property
    def num_partial_images(self) -> int:
        """Number of stream events with an unfinished image that the client asked for."""
        return 0

    def make_pipeline_options(self) -> dict[str, Any]:
        """Convert the fields of the request to keyword arguments of `AsyncPipeline.stream_updates`."""
        fields = {words.parameter: getattr(self, words.field, None) for words in WORDS.values()}
        inputs = {name: value for name, value in fields.items() if value is not None}
        if len(list_subjects(inputs)) > 1:  # OpenAI's clients always send a prompt, which may be empty
            inputs = {name: value for name, value in inputs.items() if value != ""}
        values = {
            **inputs,
            "seed": self.seed,
            "num_images": self.n,
            "method": self.method,
            "size": None if self.size == "auto" else self.size,
            "quality": self.quality_budget or _PRESETS.get(self.quality or ""),
            **{name: getattr(self, name) for name in SAMPLING},
        }
        return {name: value for name, value in values.items() if value is not None}

    def check_fields(self) -> None:
        """Raise `HttpError` if fields contradict each other."""
        if self.stream and (self.n or 1) > 1:
            remedy = "stream one image per request"
            raise HttpError(400, field="n", found=f"{self.n} with stream", expected="1", remedy=remedy)
        if self.steps:
            self._require_streaming("steps")
        if self.quality_budget and self.quality in _PRESETS:
            raise HttpError(400, "conflicts with quality_budget", field="quality", remedy="give one of them")

    def _require_streaming(self, field_name: str) -> None:
        if not self.stream:
            raise HttpError(
                400, "requires stream", field=field_name, remedy=f"set stream to true, or leave {field_name} out"
            )

    def adapt_to_bundle(self, bundle: Bundle) -> Self:
        """Return the request with all values that the bundle needs, or raise an error if it cannot generate them."""
        return self

    async def encode_file(
        self, pipeline: AsyncPipeline, prepared_request: PreparedRequest, step: StreamStep, image_index: int
    ) -> bytes:
        """Return the contents of the file for an image; empty if the response needs no file."""
        return b""

    @abstractmethod
    def make_image_fields(self, size: Size, codes: Ints, file_bytes: bytes) -> dict[str, Any]:
        """Return the fields of a response that describe one image, with the file that `encode_file` returned."""

    def make_response_fields(self, size: Size) -> dict[str, str]:
        """Return the fields of a response that are the same for all images."""
        return {"size": size.name}

    def make_image_event(self, kind: str, size: Size, codes: Ints, file_bytes: bytes) -> Event:
        """Create a stream event that contains an image: `completed` or `partial_image`."""
        image_fields = self.make_image_fields(size, codes, file_bytes)
        fields = {"created_at": int(time.time()), **self.make_response_fields(size)}
        return {"type": f"{self.EVENT_PREFIX}.{kind}", **image_fields, **fields}

    def make_final_event(self, completion: Completion) -> Event:
        return (
            self.make_image_event("completed", completion.size, completion.codes[0], completion.encoded_files[0])
            | completion.make_usage_fields()
        )

    def make_response(self, completions: Sequence[Completion]) -> Response:
        (completion,) = completions
        images = zip(completion.codes, completion.encoded_files, strict=True)
        data = [self.make_image_fields(completion.size, *image) for image in images]
        head = {"created": int(time.time()), "data": data}
        return JSONResponse({**head, **self.make_response_fields(completion.size), **completion.make_usage_fields()})


class ImagesRequest(GenerationRequest):
    """Body of `POST /v1/images/generations`. If a field is missing or null, the bundle's default is used."""

    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal[tuple(IMAGE_FORMATS)] | None = None  # type: ignore[valid-type]
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    partial_images: Annotated[int, Field(ge=0, le=MAX_PARTIAL_IMAGES)] | None = None
    # Fields of OpenAI's API that are accepted with the values that change nothing.
    background: Literal["auto", "opaque"] | None = None
    moderation: Literal["auto", "low"] | None = None
    safety_identifier: str | None = None
    style: Literal["vivid"] | None = None
    complexity: None = None
    svg: None = None
    frame_count: Annotated[int, Field(ge=9, le=9)] | None = None
    frame_duration_ms: Annotated[int, Field(ge=200, le=200)] | None = None

    EVENT_PREFIX: ClassVar[str] = "image_generation"

    @property
    def image_format(self) -> ImageFormat:
        return IMAGE_FORMATS[self.output_format or "png"]

    @property
    def num_partial_images(self) -> int:
        return self.partial_images or 0

    def check_fields(self) -> None:
        super().check_fields()
        if self.partial_images:
            self._require_streaming("partial_images")
        self.image_format.check_codec("output_format")
        if self.output_compression not in (None, 100) and not self.image_format.lossy:
            expected = f"output_format {' or '.join(name for name, each in IMAGE_FORMATS.items() if each.lossy)}"
            remedy = f"leave it out for {self.image_format.name}"
            raise HttpError(400, field="output_compression", expected=expected, remedy=remedy)

    def adapt_to_bundle(self, bundle: Bundle) -> Self:
        if not self.image_format.supports(bundle.manifest):
            problem = "gives codes, not images"
            raise HttpError(400, problem, field="model", remedy="POST to /v1/images/codes")
        return self

    async def encode_file(
        self, pipeline: AsyncPipeline, prepared_request: PreparedRequest, step: StreamStep, image_index: int
    ) -> bytes:
        image = await pipeline.image(step, image_index)
        return await asyncio.to_thread(self.image_format.encode_image, image, self.output_compression)

    def make_image_fields(self, size: Size, codes: Ints, file_bytes: bytes) -> dict[str, Any]:
        text = base64.b64encode(file_bytes).decode()
        if self.response_format == "url" and not self.stream:
            return {"url": f"data:{self.image_format.media_type};base64,{text}"}
        return {"b64_json": text}

    def make_response_fields(self, size: Size) -> dict[str, str]:
        quality = _OPENAI_QUALITIES.get(self.quality or "auto", self.quality or "auto")
        return {"output_format": self.image_format.name, "quality": quality, "background": "opaque", "size": size.name}


class EditRequest(ImagesRequest):
    """Form of `POST /v1/images/edits`, which generates a part of an image again.

    `mask` or `keep_rows` selects the part. Without them, the transparent pixels of the image are changed.
    """

    image: bytes = b""
    mask: bytes | None = None
    keep_rows: int | None = None
    input_fidelity: Literal["low", "high"] | None = None

    EVENT_PREFIX: ClassVar[str] = "image_edit"


class VariationRequest(EditRequest):
    """Form of `POST /v1/images/variations`, which changes the lower half of the token rows by default."""

    def adapt_to_bundle(self, bundle: Bundle) -> Self:
        request = super().adapt_to_bundle(bundle)
        if self.mask is not None or self.keep_rows is not None:
            return request
        return request.model_copy(update={"keep_rows": bundle.manifest.grid_rows // 2})


R = TypeVar("R", bound=GenerationRequest)


class ParsedBody(Protocol):
    """Content of a request body: requests, and how their finished images become a response."""

    @property
    def generation_requests(self) -> Sequence[GenerationRequest]:
        """Requests whose images are generated at the same time."""

    def make_response(self, completions: Sequence[Completion]) -> Response:
        """Return the response to a body whose requests do not stream events, from the images of each request."""


M = TypeVar("M", bound=BaseModel)


def parse_json_body(model_class: type[M], body: bytes) -> M:
    """Parse a JSON body, and check its fields as far as this is possible without a bundle."""
    try:
        return model_class.model_validate_json(body)
    except ValidationError as error:
        fields: dict[str, Any] = describe_validation_error(error)
        fields["field"] = fields["field"] or "body"
        if fields.get("problem") == UNKNOWN_FIELD:
            fields["remedy"] = suggest_name(fields["field"], model_class.model_fields)
        raise HttpError(400, **fields) from error


def check_and_set_defaults(request: R, max_deadline: float) -> R:
    """Check a request, and return it with a seed and a deadline, which is at most and by default `max_deadline`."""
    request.check_fields()
    if request.deadline is not None and request.deadline > max_deadline:
        expected = f"at most {max_deadline:g} s, the server's limit"
        raise HttpError(400, field="deadline", found=f"{request.deadline:g} s", expected=expected)
    seed = choose_random_seed() if request.seed is None else request.seed
    return request.model_copy(update={"seed": seed, "deadline": request.deadline or max_deadline})


@dataclass(frozen=True)
class GenerationStats:
    """Method, seeds and costs of a finished request, which a response contains as the field `lantern`."""

    model: str  # its name in the API
    method: str  # with its parameters
    quality: str | None  # preset that chose the method; None if the request named the method
    exact: bool  # whether the method samples from the target's distribution
    seeds: list[int]
    tokens_per_forward_pass: float  # of an image, averaged over images
    target_passes: int  # added up over images: a pass for a batch of images counts once for each
    realised_tvd_per_token: float  # total variation distance that relaxed acceptance caused
    seconds: float  # duration of the request
    queue_seconds: float  # time before the first forward pass
    picture_seconds: float  # time to decode and encode images, partial images included


@dataclass(frozen=True)
class Completion:
    """Finished images of a request."""

    encoded_files: list[bytes]  # from `GenerationRequest.encode_file`, one per image
    codes: list[Ints]  # [cells] of each image
    size: Size
    input_tokens: int  # of the prompts of all images
    output_tokens: int  # sampled for all images
    generation_stats: GenerationStats
    preserved_tokens: int = 0  # of all images, by an edit

    def make_usage_fields(self) -> dict[str, Any]:
        """Return the response fields `usage` (numbers of tokens) and `lantern` (method and costs)."""
        usage = {
            "input_tokens": self.input_tokens + self.preserved_tokens,
            "output_tokens": self.output_tokens,
            "total_tokens": self.input_tokens + self.preserved_tokens + self.output_tokens,
            "input_tokens_details": {"image_tokens": self.preserved_tokens, "text_tokens": self.input_tokens},
        }
        return {"usage": usage, "lantern": asdict(self.generation_stats)}


class HttpError(LanternError):
    """Error of an HTTP request, in the form that OpenAI's clients expect.

    Args:
        code: OpenAI's error code; `invalid_value` for status 400.
        retry_after: seconds after which to try again; None if that does not help.
        fields: fields of `LanternError`; `field` is a field of `ImagesRequest` or another part of the HTTP request.
    """

    def __init__(
        self, status: int, problem: str = "", code: str | None = None, retry_after: int | None = None, **fields: str
    ) -> None:
        super().__init__(problem, **fields)
        self.args = status, problem, code, retry_after
        self.status = status
        self.code = "invalid_value" if status == 400 else code
        self.retry_after = retry_after
        self.param = self.field

    @classmethod
    def from_exception(cls, error: Exception) -> HttpError:
        """Convert an exception to an HTTP error. Details of errors in the server are left to the server's log."""
        match error:
            case HttpError():
                return error
            case BusyError():
                return cls(429, str(error), "busy", error.retry_seconds)
            case RequestError(field="service" | "pipeline"):  # closed
                return cls(503, "the model has stopped", "stopped", 5, remedy="use another server")
            case RequestError():
                return cls._from_request_error(error)
            case LanternError():  # the message may name files of the server
                return cls(500, "an engine of the server failed", "engine_failed", remedy="see the server's log")
        return cls(500, "internal server error", remedy="see the server's log")

    @classmethod
    def _from_request_error(cls, error: RequestError) -> HttpError:
        _, field = PARAMETER_NAMES.get(error.field, ("", error.field))
        parts = error.remedy.split("; ")
        # Commands are for the operator, except one that serves the page with a model of any words.
        parts = [ANY_WORDS_SERVED if part == ANY_WORDS else part for part in parts]
        remedy = "; ".join(part for part in parts if part == ANY_WORDS_SERVED or "lantern-rt " not in part)
        converted = cls(400, error.problem, field=field, found=error.found, expected=error.expected, remedy=remedy)
        converted.param = "method" if field in METHODS_BY_PARAMETER else field
        converted.suggestions = error.suggestions
        return converted

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the error in OpenAI's form, with valid prompts in `suggestions` if there are any."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        is_field = self.param.isidentifier() and self.param not in ("authorization", "body")
        param = self.param if is_field else None
        suggestions = {"suggestions": [*self.suggestions]} if self.suggestions else {}
        return {"error": {"message": str(self), "type": kind, "param": param, "code": self.code, **suggestions}}

    def make_response(self) -> Response:
        headers = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after is not None:
            headers = {"retry-after": str(self.retry_after)}
        return JSONResponse(self.body(), self.status, headers)
