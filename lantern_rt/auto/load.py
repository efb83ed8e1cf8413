"""Which methods draw requests that share passes: a race for each number of images together."""

from __future__ import annotations

from dataclasses import replace

from ..methods import Auto
from ..requests import Settings
from ..runtime.state import method_nodes
from .chooser import Chooser
from .race import Race
from .store import TuningKey

FEW_NODES = 2  # of a pass: what drafts more takes time from others that share it


class LoadRaces:
    """Races of one service. chooser: whose they are. together: images that share passes at most."""

    def __init__(self, chooser: Chooser, together: int) -> None:
        self.chooser, self.together = chooser, together
        self.races: dict[TuningKey, tuple[int, Settings, Race]] = {}

    def settings(self, settings: Settings) -> Settings | None:
        """Settings of the race for a request of `auto`, or of an exact method that drafts; None: there is none.

        Where passes of other nodes may draw another picture, a race has one method.
        """
        method = settings.method
        if isinstance(method, Auto):
            return settings
        if not method.exact or method_nodes(method) <= FEW_NODES:
            return None
        strict = replace(settings, method=Auto())
        return strict if len(self.chooser.methods(strict)) > 1 else None

    def race(self, sharing: int, settings: Settings) -> Race:
        """The race of requests that share passes with others, so many images in all; the next power of two is near."""
        images = min(self.together, 1 << max(0, sharing - 1).bit_length())
        key = self.chooser.key(images, settings)
        if key not in self.races:
            self.races[key] = images, settings, self.chooser.race(images, settings)
        return self.races[key][2]

    def keep(self) -> None:
        """Keep what was found."""
        for images, settings, race in self.races.values():
            self.chooser.keep(images, settings, race)
