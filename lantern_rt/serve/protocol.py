"""What goes over the wire: requests, answers, events and errors of OpenAI's Images API, and ours."""

from __future__ import annotations

import base64
import secrets
import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import BusyError, LanternError, RequestError
from ..inputs import PARAMETER_NAMES, explain
from ..methods import PARAMETERS, Quality
from ..requests import SAMPLING

MAX_PARTIAL_IMAGES = 64
MEDIA_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
_RANDOM_SEEDS = 2**32
_PRESETS = {"low": "fast", "medium": "balanced", "high": "strict", "hd": "strict"}  # by OpenAI's qualities

Event = dict[str, Any]  # of a stream; `type` is its kind
StrictText = Annotated[str, Field(strict=True)]
StrictInt = Annotated[int, Field(strict=True)]
StrictBool = Annotated[bool, Field(strict=True)]


class ImagesRequest(BaseModel):
    """A body of `POST /v1/images/generations`. What is left out, or null, is the bundle's default."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    prompt: StrictText | None = None
    model: StrictText | None = None
    n: Annotated[StrictInt, Field(ge=1, le=10)] | None = None
    size: StrictText | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[StrictInt, Field(ge=0, le=100)] | None = None
    stream: StrictBool | None = None
    partial_images: Annotated[StrictInt, Field(ge=0, le=MAX_PARTIAL_IMAGES)] | None = None
    quality: Literal["auto", "standard", "low", "medium", "high", "hd"] | None = None
    # OpenAI's fields that leave us one thing to do
    background: Literal["auto", "opaque"] | None = None
    moderation: Literal["auto", "low"] | None = None
    user: StrictText | None = None
    safety_identifier: StrictText | None = None
    style: None = None
    complexity: None = None
    svg: None = None
    frame_count: Annotated[StrictInt, Field(ge=9, le=9)] | None = None
    frame_duration_ms: Annotated[StrictInt, Field(ge=200, le=200)] | None = None
    # ours
    negative_prompt: StrictText | None = None
    seed: StrictInt | None = None
    class_id: StrictInt | None = None
    method: StrictText | None = None
    quality_budget: Quality | None = None
    cfg_scale: float | None = None
    temperature: float | None = None
    top_k: StrictInt | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    deadline: Annotated[float, Field(gt=0)] | None = None
    steps: StrictBool | None = None

    EVENT_PREFIX: ClassVar[str] = "image_generation"  # what kinds of a stream's events begin with

    @property
    def format(self) -> str:
        """Of the files: png, jpeg or webp."""
        return self.output_format or "png"

    def options(self) -> dict[str, Any]:
        """What a call of a pipeline takes."""
        values = {
            "prompts": None if self.class_id is not None and not self.prompt else self.prompt,
            "class_ids": self.class_id,
            "negative_prompt": self.negative_prompt,
            "seed": self.seed,
            "num_images": self.n,
            "method": self.method,
            "size": None if self.size == "auto" else self.size,
            "quality": self.quality_budget or _PRESETS.get(self.quality or ""),
            **{name: getattr(self, name) for name in SAMPLING},
        }
        return {name: value for name, value in values.items() if value is not None}


R = TypeVar("R", bound=ImagesRequest)


class EditRequest(ImagesRequest):
    """A form of `POST /v1/images/edits` or `/v1/images/variations`: a picture, of which a part is drawn anew.

    Without `mask` and `keep_rows`, what is transparent of it; of variations, all below half of its rows of codes.
    """

    image: bytes = b""
    mask: bytes | None = None
    keep_rows: StrictInt | None = None
    input_fidelity: Literal["low", "high"] | None = None

    EVENT_PREFIX: ClassVar[str] = "image_edit"

    def options(self) -> dict[str, Any]:
        """What a call of a pipeline takes."""
        own = {"image": self.image, "mask": self.mask, "keep_rows": self.keep_rows}
        return super().options() | {name: value for name, value in own.items() if value is not None}


def read_request(body: bytes, max_deadline: float) -> ImagesRequest:
    """Check a body of JSON as far as it can be without a bundle.

    max_deadline: seconds that a request may take, which is the deadline of one that has none. Raises: HttpError: names
    the field at fault.
    """
    try:
        request = ImagesRequest.model_validate_json(body)
    except ValidationError as error:
        fields: dict[str, Any] = explain(error)
        fields["field"] = fields["field"] or "body"
        raise HttpError(400, **fields) from error
    return set_defaults(request, max_deadline)


def set_defaults(request: R, max_deadline: float) -> R:
    """The request with a seed and a deadline. Raises: HttpError: fields that contradict each other."""
    if request.stream and (request.n or 1) > 1:
        why = "events do not say which image they are of"
        raise HttpError(400, field="n", found=f"{request.n} with stream", expected="1", remedy=why)
    for name in ("partial_images", "steps"):
        if getattr(request, name) and not request.stream:
            raise HttpError(400, "goes with stream", field=name, remedy="leave it out, or give stream true")
    if request.quality_budget and request.quality in _PRESETS:
        raise HttpError(400, "two qualities", field="quality", remedy="leave it out, or quality_budget")
    if request.output_compression not in (None, 100) and request.format == "png":
        why = "png has none"
        raise HttpError(400, field="output_compression", expected="output_format jpeg or webp", remedy=why)
    if request.deadline is not None and request.deadline > max_deadline:
        most = f"at most {max_deadline:g} s, the server's"
        raise HttpError(400, field="deadline", found=f"{request.deadline:g} s", expected=most)
    seed = secrets.randbelow(_RANDOM_SEEDS) if request.seed is None else request.seed
    return request.model_copy(update={"seed": seed, "deadline": request.deadline or max_deadline})


@dataclass(frozen=True)
class Figures:
    """What drawing a request took; `lantern` of an answer.

    Args:
        model: name of the bundle.
        method: that drew, with its parameters.
        quality: the preset whose method it is, None where a method was named.
        exact: whether the method samples the target's own distribution.
        seeds: of each image.
        tokens_per_forward_pass: of an image, the mean over images.
        target_passes: of all images; a pass counts for every image in it.
        realised_tvd_per_token: given away by relaxed acceptance.
        seconds: all of it.
        queue_seconds: before the first pass.
        picture_seconds: decoding and encoding pictures, also those on the way.
    """

    model: str
    method: str
    quality: str | None
    exact: bool
    seeds: list[int]
    tokens_per_forward_pass: float
    target_passes: int
    realised_tvd_per_token: float
    seconds: float
    queue_seconds: float
    picture_seconds: float


@dataclass(frozen=True)
class Completion:
    """A request's pictures, all of one size (WIDTHxHEIGHT), as files; tokens of all of them together, and figures."""

    images: list[bytes]
    size: str
    input_tokens: int
    output_tokens: int
    figures: Figures
    preserved: int = 0  # codes of all of them that were given, not drawn

    def answer(self, request: ImagesRequest) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        if request.response_format == "url":
            media = MEDIA_TYPES[request.format]
            data = [{"url": f"data:{media};base64,{_base64(picture)}"} for picture in self.images]
        else:
            data = [{"b64_json": _base64(picture)} for picture in self.images]
        return {"created": int(time.time()), "data": data, **_image_format(request, self.size), **self._usage()}

    def event(self, request: ImagesRequest) -> Event:
        """The last event of a stream."""
        return image_event("completed", request, self.size, self.images[0]) | self._usage()

    def _usage(self) -> dict[str, Any]:
        usage = {
            "input_tokens": self.input_tokens + self.preserved,
            "output_tokens": self.output_tokens,
            "total_tokens": self.input_tokens + self.preserved + self.output_tokens,
            "input_tokens_details": {"image_tokens": self.preserved, "text_tokens": self.input_tokens},
        }
        return {"usage": usage, "lantern": asdict(self.figures)}


def image_event(kind: str, request: ImagesRequest, size: str, picture: bytes) -> Event:
    """An event with a picture.

    Args:
        kind: `completed` or `partial_image`.
        request: that it answers.
        size: of the picture, WIDTHxHEIGHT.
        picture: a file.
    """
    return {
        "type": f"{request.EVENT_PREFIX}.{kind}",
        "b64_json": _base64(picture),
        "created_at": int(time.time()),
        **_image_format(request, size),
    }


def _image_format(request: ImagesRequest, size: str) -> dict[str, str]:
    quality = {"hd": "high", "standard": "auto"}.get(request.quality or "auto", request.quality or "auto")
    return {"output_format": request.format, "quality": quality, "background": "opaque", "size": size}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


class HttpError(LanternError):
    """An error as OpenAI's clients know it.

    Args:
        status: of HTTP.
        problem, fields: as for `LanternError`; `field` is one of `ImagesRequest`, or another part of what came.
        code: a word for programs; that of status 400 is `invalid_value`.
        seconds: when to try again, if that helps.
    """

    def __init__(
        self, status: int, problem: str = "", code: str | None = None, retry_after: int | None = None, **fields: str
    ) -> None:
        super().__init__(problem, **fields)
        self.status = status
        self.code = "invalid_value" if status == 400 else code
        self.retry_after = retry_after
        self.param = self.field

    @classmethod
    def from_exception(cls, error: Exception) -> HttpError:
        """What an error is over HTTP. The user's own are told; of bugs only that there was one."""
        if isinstance(error, HttpError):
            return error
        if isinstance(error, BusyError):
            return cls(429, str(error), "busy", error.seconds)
        if isinstance(error, RequestError) and error.field in ("service", "pipeline"):  # it was closed
            return cls(503, "the model does not run any more", "stopped", 5, remedy="ask another server")
        if isinstance(error, RequestError):
            _, field = PARAMETER_NAMES.get(error.field, ("", error.field))
            remedy = "; ".join(part for part in error.remedy.split("; ") if "lantern-rt " not in part)
            refusal = cls(400, error.problem, field=field, found=error.found, expected=error.expected, remedy=remedy)
            refusal.param = "method" if field in PARAMETERS else field
            return refusal
        if isinstance(error, LanternError):  # its words may name files of the server
            return cls(500, "the server's engines failed", "engine_failed", remedy="its log says more")
        return cls(500, "an error in the server", remedy="its log says more")

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        of_body = self.param.isidentifier() and self.param not in ("authorization", "body")
        param = self.param if of_body else None
        return {"error": {"message": str(self), "type": kind, "param": param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with it."""
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
