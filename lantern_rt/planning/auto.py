"""Method `auto`: the choice stored for this host, or one that is made while drawing, or from a probe of the host.

Where nothing may be given away, exact methods race on the picture itself, see `race.py`. Relaxed methods change the
picture and so cannot: they are planned from acceptance statistics, which depend on the model and not on the host, and a
three-second probe of this host's passes. Where that does not promise a gain by one, exact methods race.
"""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..bundle.files import Bundle
from ..bundle.manifest import Manifest
from ..errors import LanternError, OutputError
from ..methods import PARAMETERS, Ar, Auto, MethodConfig, Sjd
from ..requests import Settings, resolve_settings
from .acceptance_statistics import AcceptanceStatistics, MethodStatistics, bundle_statistics, drafting_aside, merge
from .budget import budget_of, given_away
from .costs import RELAXED_WINDOW, HostCosts, early_pass, measure_costs, with_overhead
from .race import Exact, Race, Timed
from .store import Choice, Situation, Tuning, ignore_choice, read_tuning, write_tuning
from .tree_search import best_plan

if TYPE_CHECKING:
    from ..engines.loader import Engines

PROBE_SECONDS = 3.0
MOST_PREDICTED = 256  # situations that are remembered: services are asked for budgets of all sizes
PROBE_MARGIN = 1.15  # what is only predicted must promise this much over plain decoding
Decode = Callable[[Settings], Iterator[object]]

_log = logging.getLogger(__name__)


def with_default_method(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a request, with method `auto` if it names none, nor anything that only some methods take."""
    given = {name.rstrip("_") for name, value in options.items() if value is not None}
    own = given & {"method", *PARAMETERS} - {"quality"}
    return dict(options) if own else {**options, "method": "auto"}


class Chooser:
    """Chooses for one bundle and its engines; several threads may use one."""

    def __init__(self, bundle: Bundle, engines: Engines) -> None:
        self.bundle, self.engines = bundle, engines
        self._brought = bundle_statistics(bundle)
        self._probing, self._told = threading.Lock(), False
        self._races: dict[Situation, tuple[Timed, ...]] = {}
        self._probed: dict[int, HostCosts] = {}
        self._predicted: dict[tuple[Situation, int], tuple[Choice, str] | None] = {}

    def situation(self, images: int, temperature: float | None, quality: str) -> Situation:
        """What a choice depends on besides the bundle; temperature None: the bundle's."""
        greedy = (self.bundle.manifest.sampling.temperature if temperature is None else temperature) == 0
        backend, threads = self.engines.backend, self.engines.threads
        return Situation(backend=backend, threads=threads, images=images, greedy=greedy, quality=quality)

    def choose(self, images: int, settings: Settings, decode: Decode, racing: bool = False) -> Settings:
        """Settings of what suits this host, with the reason in `choice`; those given, where a race is to find it.

        settings: those of `auto`, for `images` images together. decode: runs the request with other settings.
        """
        assert isinstance(settings.method, Auto)
        manifest, tuning = self.bundle.manifest, read_tuning(self.bundle.digest)
        situation = self._situation_of(images, settings)
        if racing and budget_of(settings.method).exact:
            return self._exact(settings)
        known = known_statistics(manifest, self._brought, tuning, situation.greedy)
        if (choice := tuning.choices.get(str(situation))) is not None:
            gain = f"{choice.method}, speed-up {choice.speed_up:.2f} here"
            gain = "ar, as nothing was faster here" if isinstance(choice.method, Ar) else gain
            reason = f"auto: {gain} {'when tuned' if choice.found == 'tuned' else 'while drawing'} on {choice.date}"
            key = drafting_aside(choice.method), situation.greedy
            entry = next((one for one in known if one.key == key and not one.method.exact), None)
            reason += f"; {given_away(choice.method, entry)}" if entry is not None else ""
        else:
            if budget_of(settings.method).exact or not known:
                return self._exact(settings)
            rows = images * (2 if settings.sampling.guided else 1)
            costs = self._costs(rows, situation, settings, decode)
            if len(self._predicted) > MOST_PREDICTED:
                self._predicted.clear()
            if (situation, rows) not in self._predicted:
                self._predicted[situation, rows] = predicted_choice(known, costs, situation.quality)
            found = self._predicted[situation, rows]
            if found is None or found[0].method.exact:
                return self._exact(settings)
            choice, reason = found
        try:
            checked = resolve_settings(manifest, {"method": choice.method})
        except LanternError as error:
            ignore_choice(self.bundle.digest, situation, error)
            return self._exact(settings)
        return replace(settings, method=checked.method, choice=reason)

    def _exact(self, settings: Settings) -> Settings:
        """Of a race that gives nothing away; plain decoding where only that draws its pictures."""
        integers = self.engines.integers
        if not integers and self.bundle.manifest.target.dtype == "float32":
            return replace(settings, method=Auto(quality="strict"))
        cure = ", or give --expand-weights" if integers else ""
        why = f"as at this precision other methods draw other pictures; name one, or run `lantern-rt tune`{cure}"
        return replace(settings, method=Ar(), choice=f"auto: ar, {why}")

    def race(self, images: int, settings: Settings) -> Race:
        """The race for requests like this one, as the last one left it. Give it back after the images."""
        situation = self._situation_of(images, settings)
        tuning = read_tuning(self.bundle.digest)
        before = self._races.get(situation) or tuning.races.get(str(situation), ())
        manifest = self.bundle.manifest
        statistics = known_statistics(manifest, self._brought, tuning, situation.greedy)
        windows = next((entry.windows for entry in statistics if entry.method == Sjd()), ())
        known: dict[Exact, float] = {Sjd(window=one.window): one.tokens for one in windows}
        race = Race(manifest.drafter is not None, self.engines.most_nodes, before, known)
        if (choice := tuning.choices.get(str(situation))) is not None and choice.method in race.methods:
            race.settle(choice.method)
        return race

    def give_back(self, images: int, settings: Settings, race: Race) -> None:
        """Keep what a race has found, for good once it is decided."""
        if race.settled:
            return
        situation = self._situation_of(images, settings)
        self._races[situation] = tuple(race.timed.values())
        tuning, key = read_tuning(self.bundle.digest), str(situation)
        races = {name: timed for name, timed in tuning.races.items() if name != key}
        if race.decided:
            choice = Choice(
                method=race.method,
                speed_up=race.speed_up,
                tokens_per_forward_pass=race.tokens,
                date=datetime.date.today().isoformat(),
                found="while drawing",
            )
            tuning = tuning.model_copy(update={"choices": {key: choice, **tuning.choices}, "races": races})
        else:
            tuning = tuning.model_copy(update={"races": {**races, key: self._races[situation]}})
        self._keep(tuning)

    def _keep(self, tuning: Tuning) -> None:
        """Store it; where that fails, every process has to find out for itself, which is said once."""
        try:
            write_tuning(tuning)
        except OutputError as error:
            if not self._told:
                _log.warning("what was measured is not kept: %s", error)
            self._told = True

    def _situation_of(self, images: int, settings: Settings) -> Situation:
        assert isinstance(settings.method, Auto)
        return self.situation(images, settings.sampling.temperature, settings.method.quality)

    def _costs(self, rows: int, situation: Situation, settings: Settings, decode: Decode) -> HostCosts:
        """What steps cost here for requests like this one; measured once per host, threads and number of rows.

        Unsteady costs are kept by this process alone: others may find the host quieter.
        """
        key = f"{situation.backend}, {situation.threads} threads, {rows} rows"
        with self._probing:
            tuning = read_tuning(self.bundle.digest)
            costs = self._probed.get(rows) or tuning.probes.get(key)
            if costs is None:
                target, drafter = self.engines.target, self.engines.drafter
                costs = measure_costs(self.bundle.manifest, target, drafter, rows, PROBE_SECONDS * 2 / 3)

                def steps(method: MethodConfig) -> Iterator[object]:
                    return decode(replace(settings, method=method))

                plain = early_pass(self.bundle.manifest, target, rows)
                costs = with_overhead(costs, plain, steps, PROBE_SECONDS / 3, window=RELAXED_WINDOW)
                if costs.steady:
                    self._keep(tuning.model_copy(update={"probes": {**tuning.probes, key: costs}}))
            self._probed[rows] = costs
            return costs


def known_statistics(
    manifest: Manifest, brought: AcceptanceStatistics | None, tuning: Tuning, greedy: bool
) -> tuple[MethodStatistics, ...]:
    """Statistics to plan with, measured here or brought by the bundle, whichever is of more images."""
    known = merge(tuning.statistics, brought.fitting(manifest) if brought is not None else ())
    return tuple(entry for entry in known if entry.greedy == greedy)


def predicted_choice(entries: Iterable[MethodStatistics], costs: HostCosts, quality: str) -> tuple[Choice, str] | None:
    """The best plan by statistics and this host's costs, and why; None unless it promises a clear gain.

    No plan is of more nodes than were timed: on a slow or busy host those are few, and larger passes may cost anything.
    """
    budget, timed = budget_of(Auto(quality=quality)), max(costs.target)
    plans = [(best_plan(entry, costs, timed), entry) for entry in entries]
    carried_out = [(plan, entry, entry.method.model_copy(update=plan.drafting)) for plan, entry in plans]
    allowed = [one for one in carried_out if budget.allows(one[2], one[1])]
    if not allowed or not costs.steady:
        return None
    plan, entry, method = max(allowed, key=lambda one: one[0].rate)
    if plan.rate * costs.plain_seconds <= PROBE_MARGIN:
        return None
    choice = Choice(
        method=method,
        speed_up=plan.rate * costs.plain_seconds,
        tokens_per_forward_pass=plan.tokens,
        tvd_per_token=entry.tvd_per_token,
        nll_ratio=entry.nll_ratio,
    )
    given = "" if method.exact else f"; {given_away(method, entry)}"
    gain = f"{method}, speed-up {choice.speed_up:.2f} by a short probe of this host{given}"
    return choice, f"auto: {gain}; `lantern-rt tune` measures it"
