"""Options that several commands of `lantern-rt` share."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, and nothing else.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
