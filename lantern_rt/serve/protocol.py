"""What goes over the wire: requests of OpenAI's Images API and ours beside them, answers, events, errors."""

from __future__ import annotations

import base64
import json
import re
import secrets
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..checks import explain, short
from ..errors import BusyError, LanternError, RequestError
from ..methods import PARAMETERS
from ..requests import SAMPLING
from .drawing import Order, Summary, Update

Number = Annotated[int, Field(strict=True)]
FORMATS = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
MOST_PARTIAL = 64  # pictures on the way
RANDOM_SEEDS = 2**32


class ImagesRequest(BaseModel):
    """A body of `POST /v1/images/generations`. What is left out, or null, is the bundle's default."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    prompt: Annotated[str, Field(strict=True)] | None = None
    model: Annotated[str, Field(strict=True)] | None = None
    n: Annotated[Number, Field(ge=1, le=10)] | None = None
    size: Annotated[str, Field(strict=True)] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[Number, Field(ge=0, le=100)] | None = None
    stream: Annotated[bool, Field(strict=True)] | None = None
    partial_images: Annotated[Number, Field(ge=0, le=MOST_PARTIAL)] | None = None
    # OpenAI's fields that leave us one thing to do
    quality: Literal["auto"] | None = None
    background: Literal["auto", "opaque"] | None = None
    moderation: Literal["auto", "low"] | None = None
    user: Annotated[str, Field(strict=True)] | None = None
    # ours
    seed: Number | None = None
    class_id: Number | None = None
    method: Annotated[str, Field(strict=True)] | None = None
    quality_budget: Annotated[str, Field(strict=True)] | None = None
    cfg_scale: float | None = None
    cfg_interval: int | None = None
    temperature: float | None = None
    top_k: Number | None = None
    top_p: float | None = None
    deadline: Annotated[float, Field(gt=0)] | None = None
    steps: Annotated[bool, Field(strict=True)] | None = None

    def options(self) -> dict[str, Any]:
        """What a call of a pipeline takes; a seed is drawn where none is given. Raises: RequestError: a tree's file."""
        if ".json" in (self.method or ""):
            raise RequestError(
                f"method: found {short(self.method)}, expected a tree by its name: files are the server's"
            )
        given = {
            "prompts": None if self.class_id is not None and not self.prompt else self.prompt,
            "class_ids": self.class_id,
            "seed": secrets.randbelow(RANDOM_SEEDS) if self.seed is None else self.seed,
            "num_images": self.n,
            "method": self.method,
            "size": None if self.size == "auto" else self.size,
            "quality": self.quality_budget,
            **{name: getattr(self, name) for name in SAMPLING},
        }
        return {name: value for name, value in given.items() if value is not None}

    def order(self) -> Order:
        """What is to be drawn. Raises: RequestError: parts do not fit each other."""
        if self.stream and (self.n or 1) > 1:
            raise RequestError(f"n: found {self.n} with stream, expected 1: events do not say which image they are of")
        alone = {"partial_images": self.partial_images, "steps": self.steps}
        if not self.stream and (idle := [name for name, value in alone.items() if value]):
            raise RequestError(f"{idle[0]}: goes with stream; leave it out, or give stream true")
        file = self.output_format or "png"
        if self.output_compression is not None and file == "png":
            raise RequestError("output_compression: goes with output_format jpeg or webp, found png; leave it out")
        partial = self.partial_images or 0
        return Order(self.options(), file, self.output_compression, partial, bool(self.steps), self.deadline)


def read_request(body: bytes) -> ImagesRequest:
    """A request's body. Raises: HttpError: names the field at fault."""
    try:
        return ImagesRequest.model_validate_json(body)
    except ValidationError as error:
        field, problem = explain(error)
        raise HttpError(400, f"{field or 'body'}: {problem}", field or None, "invalid_value") from error


@dataclass(frozen=True)
class Form:
    """How a request wants its answer."""

    file: str
    size: str
    url: bool = False

    def about(self) -> dict[str, Any]:
        """What answers and events say of their pictures."""
        return {"output_format": self.file, "quality": "auto", "background": "opaque", "size": self.size}

    def answer(self, update: Update) -> dict[str, Any]:
        """The answer with all pictures. update: the last one."""
        assert update.summary is not None
        data = [
            {"url": f"data:{FORMATS[self.file]};base64,{_text(one)}"} if self.url else {"b64_json": _text(one)}
            for one in update.pictures
        ]
        return {"created": int(time.time()), "data": data, **self.about(), **_summary(update.summary)}

    def events(self, update: Update) -> bytes:
        """The server-sent events of an update; none where it brings nothing new."""
        common, found = {"created_at": int(time.time()), **self.about()}, b""
        if update.kinds:
            names = ("done", "total", "rows", "columns", "kinds", "drafted", "method")
            found += _event("lantern.step", {name: getattr(update, name) for name in names})
        if update.partial is not None:
            picture = {"b64_json": _text(update.pictures[0]), "partial_image_index": update.partial}
            found += _event("image_generation.partial_image", picture | common)
        if update.summary is not None:
            picture = {"b64_json": _text(update.pictures[0])}
            found += _event("image_generation.completed", picture | common | _summary(update.summary))
        return found


def _summary(summary: Summary) -> dict[str, Any]:
    tokens = {"input_tokens": summary.input_tokens, "output_tokens": summary.output_tokens}
    usage = {
        **tokens,
        "total_tokens": sum(tokens.values()),
        "input_tokens_details": {"image_tokens": 0, "text_tokens": summary.input_tokens},
    }
    return {"usage": usage, "lantern": summary.extension()}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode()


def error_event(error: BaseException) -> bytes:
    """The event of an error after a stream has begun: OpenAI's client looks for its key."""
    return f"data: {json.dumps(HttpError.of(error).body())}\n\n".encode()


@dataclass(eq=False)
class HttpError(Exception):
    """An error as OpenAI's clients know it. seconds: when to try again, if that helps."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    seconds: int | None = None

    @classmethod
    def of(cls, error: BaseException) -> HttpError:
        """What an error is over HTTP. The user's own are told; of bugs only that there was one."""
        if isinstance(error, HttpError):
            return error
        text = str(error)
        if isinstance(error, BusyError):
            return cls(429, f"busy: {text}", None, "busy", error.seconds)
        if isinstance(error, RequestError):
            if text.startswith(("service: ", "pipeline: ")):  # it ended
                return cls(503, "the model does not run any more; ask another server", None, "stopped", 5)
            return cls(400, text, _parameter(text), "invalid_value")
        if isinstance(error, LanternError):  # its words may name files of the server
            return cls(500, "the server's engines failed; its log says more", None, "engine_failed")
        return cls(500, "an error in the server; its log says more")

    @property
    def type(self) -> str:
        """OpenAI's word for this kind of error."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """The error object."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with it."""
        return {} if self.seconds is None else {"retry-after": str(self.seconds)}


def _parameter(message: str) -> str | None:
    """The field that a message is about: it begins with its name."""
    match = re.match(r"([a-z][a-z_ ]*?)(?: \d+ of \d+)?:", message)
    own = {**dict.fromkeys((*PARAMETERS, "methods"), "method"), "num_images": "n", "quality": "quality_budget"}
    name = match[1].replace(" ", "_") if match else ""
    name = own.get(name, name)
    return name if name in ImagesRequest.model_fields else None
