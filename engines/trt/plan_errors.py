"""Where a plan comes from, and what is said when it does not load or run.

Does not know what went wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import EngineError
from ..profiles import Profile
from .library import Messages


@dataclass(frozen=True)
class PlanSource:
    """Where a plan comes from: its file, the ranges it was built for, and the command that builds it again."""

    path: Path
    profiles: tuple[Profile, ...]
    rebuild: str


@dataclass(frozen=True)
class PlanErrors:
    """Makes the errors of one plan; `messages` are what the library said meanwhile."""

    library: Any
    source: PlanSource
    messages: Messages

    def check(self, success: bool, what: str) -> None:
        """EngineError unless the library did `what`."""
        if not success:
            raise self.failure(f"does not {what}")

    def failure(self, what: str, reason: str | None = None, cure: str | None = None) -> EngineError:
        """The library fails; without a reason the library's own words, without a cure the command that rebuilds."""
        return EngineError(
            f"{self.source.path}: {self.library.__name__} {self.library.__version__} {what}: "
            f"{reason or self.messages.brief()}; {cure or f'rebuild with `{self.source.rebuild}`'}"
        )

    def other(self, found: str, expected: str) -> EngineError:
        """The plan is not the one expected."""
        return EngineError(
            f"{self.source.path}: found {found}, expected {expected}; rebuild with `{self.source.rebuild}`"
        )
