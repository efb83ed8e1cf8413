"""Method `auto` of one bundle on this host: races by situation, their winners stored between runs."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..bundle.files import Bundle
from ..errors import OutputError
from ..methods import PARAMETERS, Auto, MethodConfig
from ..requests import Settings
from .presets import same_pictures
from .race import Race, Record
from .store import Choice, Tuning, TuningKey, read_tuning, write_tuning

if TYPE_CHECKING:
    from ..engines.loader import Engines

_log = logging.getLogger(__name__)


def with_default_method(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a request, with method `auto` if they name none, nor a parameter that only some methods take."""
    names = {name.rstrip("_") for name, value in options.items() if value is not None}
    chosen = names & {"method", *PARAMETERS} - {"quality"}
    return dict(options) if chosen else {**options, "method": "auto"}


class Chooser:
    """Races of one bundle and its engines; several threads may use one.

    Args:
        bundle: whose digest names what is stored.
        engines: that run it.
    """

    def __init__(self, bundle: Bundle, engines: Engines) -> None:
        self.bundle = bundle
        self.engines = engines
        self._races: dict[TuningKey, Race] = {}
        self._warned = False

    def key(self, images: int, settings: Settings) -> TuningKey:
        """What a race of requests like this one holds for."""
        assert isinstance(settings.method, Auto)
        return TuningKey(
            backend=self.engines.backend,
            threads=self.engines.threads,
            images=images,
            greedy=settings.sampling.greedy,
            quality=settings.method.quality,
        )

    def methods(self, settings: Settings) -> list[MethodConfig]:
        """Every method that may draw requests like this one: they draw the same pictures."""
        return self._new_race(settings, (), whole=False).methods

    def race(self, images: int, settings: Settings, whole: bool = False) -> Race:
        """The race for requests like this one, as earlier ones left it.

        Args:
            images: that share passes.
            settings: of method `auto`.
            whole: turns are whole batches, not passes: for images that begin together, and end apart.
        """
        key = self.key(images, settings)
        tuning = read_tuning(self.bundle.digest)
        running = self._races.get(key)
        records = running.records if running else tuning.races.get(str(key), ())
        race = self._new_race(settings, records, whole)
        choice = tuning.choices.get(str(key))
        if choice is not None and choice.method in race.methods:
            race.settle(choice.method)
        return race

    def describe(self, settings: Settings, race: Race) -> str:
        """One line: what draws, and why."""
        assert isinstance(settings.method, Auto)
        preset = f"auto chose {race.method}"
        if len(race.methods) == 1:
            return f"{preset} ({settings.method.quality})"
        if not race.decided:
            return f"{preset} for now ({settings.method.quality}; the race for the fastest goes on)"
        if race.method == race.baseline:
            return f"{preset} ({settings.method.quality}; nothing was clearly faster)"
        gain = f"; {race.speed_up:.2f}x faster than {race.baseline}" if race.speed_up != 1.0 else ""
        return f"{preset} ({settings.method.quality}{gain})"

    def keep(self, images: int, settings: Settings, race: Race) -> None:
        """Keep what a race found, its winner for good.

        Args:
            images: that share passes.
            settings: of method `auto`.
            race: from `race`, after the images.
        """
        key = self.key(images, settings)
        tuning = read_tuning(self.bundle.digest)
        if len(race.methods) == 1 or str(key) in tuning.choices:
            return
        self._races[key] = race
        races = {name: records for name, records in tuning.races.items() if name != str(key)}
        choices = dict(tuning.choices)
        if race.decided:
            today = datetime.date.today().isoformat()
            choices[str(key)] = Choice.model_validate({"method": race.method, "speed_up": race.speed_up, "date": today})
        else:
            races[str(key)] = race.records
        self._write(Tuning(bundle_digest=self.bundle.digest, choices=choices, races=races))

    def _new_race(self, settings: Settings, records: Sequence[Record], whole: bool) -> Race:
        assert isinstance(settings.method, Auto)
        manifest = self.bundle.manifest
        method = manifest.preset_method(settings.method.quality)
        tree_invariant = manifest.target.dtype == "float32" and not self.engines.integers
        baseline, ladders = same_pictures(manifest, method, tree_invariant, self.engines.most_nodes)
        return Race(baseline, ladders, records, whole)

    def _write(self, tuning: Tuning) -> None:
        """Store it; where that fails, every process has to race for itself, which is said once."""
        try:
            write_tuning(tuning)
        except OutputError as error:
            if not self._warned:
                _log.warning("what was measured is not kept: %s", error)
            self._warned = True
