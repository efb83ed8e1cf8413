"""Number types of the manifest, with bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

# Bounds far above the sizes of real models, so that a damaged manifest cannot exhaust memory or time.
Count = Annotated[int, Field(ge=1, le=1_000_000)]
SmallCount = Annotated[int, Field(ge=1, le=1024)]
Side = Annotated[int, Field(ge=1, le=256)]  # Number of grid rows or columns.
MAX_PIXELS = 8192  # Maximum width and height of an image.
Pixels = Annotated[int, Field(ge=1, le=MAX_PIXELS)]
TokenId = Annotated[int, Field(ge=0, le=2**31)]
