"""What `--method auto` decodes a request with: reads what is stored, probes the host if need be, stores the probe.

The choice itself is made in `tuning/auto.py`. Does not know prompts or pictures; it decodes a few steps of the request
through a function that it is given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from ..bundle.files import Bundle
from ..errors import OutputError
from ..methods import leaves_choice
from ..requests import Options, Settings, resolve_settings
from ..runtime.tree_names import named_tree
from .auto import PROBE_SECONDS, known_rates, predicted_choice, stored_choice
from .costs import HostCosts
from .probe import CHAIN, WINDOW, measure_costs, with_overhead
from .rates_file import brought_rates
from .store import Choice, Probe, Situation, read_tuning, write_tuning

if TYPE_CHECKING:
    from ..engines.loader import Engines

Decode = Callable[[Settings], Iterator[object]]


def with_default_method(bundle: Bundle, options: Options) -> Options:
    """The options with method `auto` where it is the default, else as they are.

    It is where a caller names no method nor anything that only some methods take, and something is known of the bundle:
    it brings rates, or `tune` has measured it here. `quality` alone asks for `auto` too.
    """
    if not leaves_choice(options):
        return options
    known = options.get("quality") is not None or "rates" in bundle.manifest.files
    if not known:
        tuning = read_tuning(bundle.digest)
        known = bool(tuning.entries or tuning.rates)
    return cast(Options, {**options, "method": "auto"}) if known else options


class Chooser:
    """Chooses for one bundle and its engines; several threads may use one."""

    def __init__(self, bundle: Bundle, engines: Engines) -> None:
        self.bundle, self.engines = bundle, engines
        self._rates = brought_rates(bundle)
        self._probing = threading.Lock()
        self._probed: dict[int, Probe] = {}
        self._predicted: dict[tuple[Situation, int], tuple[Choice, str]] = {}

    def situation(self, images: int, temperature: float | None, quality: str) -> Situation:
        """What a choice depends on besides the bundle; temperature None: the bundle's."""
        greedy = (self.bundle.manifest.sampling.temperature if temperature is None else temperature) == 0
        backend, threads = self.engines.backend, self.engines.threads.intra_op
        return Situation(backend=backend, threads=threads, images=images, greedy=greedy, quality=quality)

    def choose(self, images: int, settings: Settings, options: Options, decode: Decode) -> Settings:
        """Settings of what suits this host, with the reason in `choice`.

        settings: those of `auto`, for `images` images together. decode: runs the request with other settings.
        """
        situation = self.situation(images, settings.temperature, settings.quality or "balanced")
        choice, reason = self._choice(situation, settings, decode)
        kept = {name: value for name, value in options.items() if name not in ("method", "quality")}
        chosen = cast(Options, kept | choice.parameters())
        return replace(resolve_settings(self.bundle.manifest, chosen), choice=reason)

    def _choice(self, situation: Situation, settings: Settings, decode: Decode) -> tuple[Choice, str]:
        manifest, tuning = self.bundle.manifest, read_tuning(self.bundle.digest)
        if (stored := stored_choice(tuning, situation)) is not None:
            return stored
        entries, missing = known_rates(manifest, self._rates, tuning, situation.greedy)
        if not entries:
            return Choice(method="ar"), missing
        rows = situation.images * (1 if settings.cfg_scale == 1 else 2)
        costs = self._costs(rows, situation, settings, decode)
        if (situation, rows) not in self._predicted:
            self._predicted[situation, rows] = predicted_choice(entries, costs, situation)
        return self._predicted[situation, rows]

    def _costs(self, rows: int, situation: Situation, settings: Settings, decode: Decode) -> HostCosts:
        """What steps cost here for requests like this one; measured once per host, threads and number of rows."""
        manifest, (target, drafter) = self.bundle.manifest, (self.engines.target, self.engines.drafter)
        with self._probing:
            tuning = read_tuning(self.bundle.digest)
            known = self._probed.get(rows) or tuning.probe(situation, rows)
            if known is None:
                plain = replace(settings, method="ar", quality=None)
                window = replace(plain, method="sjd", window=WINDOW, redraft="coupled", start="left")
                shape = named_tree(f"chain-{CHAIN}")
                chain = replace(plain, method="eagle", tree=shape.name, shape=shape)
                costs = measure_costs(manifest, target, drafter, rows, PROBE_SECONDS / 2)
                costs = with_overhead(costs, decode(plain), decode(window), decode(chain) if drafter else None)
                known = Probe.of(situation, rows, costs)
                with suppress(OutputError):  # where nothing can be kept, every process probes for itself
                    write_tuning(tuning.model_copy(update={"probes": (*tuning.probes, known)}))
            self._probed[rows] = known
            return known.costs()
