"""Requests for the codes (image tokens) of images at `POST /v1/images/codes`, with JSON or .npz responses."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, WithJsonSchema
from starlette.responses import Response

from ..output.formats import CODES
from ..results import finish_image, split_codes_by_grid
from .protocol import GenerationRequest, HttpError

if TYPE_CHECKING:
    from ..asynchronous import AsyncPipeline
    from ..bundle.files import Bundle
    from ..bundle.manifest import Size
    from ..prepared import PreparedRequest
    from ..results import Ints, StreamStep
    from .protocol import Completion

_DATA_URL = re.compile("data:image/(?:png|jpeg|webp);base64,", re.IGNORECASE)
_BASE64 = WithJsonSchema({"type": "string", "format": "base64"})


def _decode_image(value: Any) -> Any:
    """Decode base64, which may have line breaks and the prefix of a data URL."""
    if not isinstance(value, str):
        return value
    prefix = _DATA_URL.match(value)
    try:
        return base64.b64decode("".join(value[prefix.end() if prefix else 0 :].split()), validate=True)
    except ValueError as error:
        raise ValueError("expected a PNG, JPEG or WebP file in base64") from error


class CodesRequest(GenerationRequest):
    """Body of `POST /v1/images/codes`, for bundles with and without an image decoder. `image`: source, in base64."""

    image: Annotated[bytes, BeforeValidator(_decode_image), _BASE64] | None = None

    EVENT_PREFIX: ClassVar[str] = "image_codes"

    def adapt_to_bundle(self, bundle: Bundle) -> Self:
        if self.image is not None and bundle.manifest.source is None:
            problem = f"model {bundle.manifest.name} takes no source image"
            raise HttpError(400, problem, field="image", remedy="leave it out")
        return self

    def make_image_fields(self, size: Size, codes: Ints, file_bytes: bytes) -> dict[str, Any]:
        first, grid = split_codes_by_grid(size, codes)
        return {"codes": grid.tolist(), "first_codes": first.tolist()}


class CodesFileRequest(CodesRequest):
    """Request for the codes of one image. The response is an .npz file like the files of `lantern-rt run --codes`."""

    def check_fields(self) -> None:
        super().check_fields()
        if self.stream or (self.n or 1) > 1:
            field = "stream" if self.stream else "n"
            problem = "cannot be combined with an .npz response"
            raise HttpError(400, problem, field=field, remedy=f"accept JSON, or leave {field} out")

    async def encode_file(
        self, pipeline: AsyncPipeline, prepared_request: PreparedRequest, step: StreamStep, image_index: int
    ) -> bytes:
        image = prepared_request.images[image_index]
        return CODES.encode(finish_image(prepared_request.bundle, prepared_request.settings, image, step, image_index))

    def make_response(self, completions: Sequence[Completion]) -> Response:
        return Response(completions[0].encoded_files[0], media_type=CODES.media_type)
