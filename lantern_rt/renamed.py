"""Hints for users of attributes that have new names (CHANGELOG.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

RENAMED = {
    "check_room": "check_image_memory",
    "draw": "decode_image",
    "forget": "cancel",
    "room": "capacity",
    "settings_here": "adapt_settings",
}


class HasRenamedAttributes:
    """Base class whose error for a renamed attribute gives the new name."""

    if not TYPE_CHECKING:  # type checkers would accept every attribute

        def __getattr__(self, name: str) -> object:
            hint = f"; it is now called {RENAMED[name]!r}" if name in RENAMED else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)
