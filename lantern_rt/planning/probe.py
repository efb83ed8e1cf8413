"""A quick look at what steps cost here, for a request that is about to be decoded.

Pass times come from the engines alone; what happens around them comes from a few real steps of the request itself.
Does not choose.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

from ..bundle.manifest import Manifest
from ..runtime.engine import Engine
from .costs import HostCosts, measure_pass

STEPS = 8  # steps timed; the first ones, whose past is short, are left out
CHAIN = 4
WINDOW = 7


def measure_costs(manifest: Manifest, target: Engine, drafter: Engine | None, rows: int, seconds: float) -> HostCosts:
    """Cost curves of the engines at a past of half an image; nothing around them yet."""
    past = manifest.condition.prefix + manifest.codes_per_image // 2
    spec = manifest.target
    target_curve = measure_pass(target, rows, past, spec.hidden_size, spec.vocab_size, False, seconds / 2)
    if drafter is None:
        return HostCosts(target_curve, None, 0.0, 0.0)
    drafter_curve = measure_pass(drafter, rows, past, spec.hidden_size, spec.vocab_size, True, seconds / 2)
    return HostCosts(target_curve, drafter_curve, 0.0, 0.0)


def with_overhead(
    costs: HostCosts, plain: Iterator[object], window: Iterator[object], chain: Iterator[object] | None
) -> HostCosts:
    """The costs with what a step, a code of a window and a drafter pass take outside the engines.

    `plain`, `window` and `chain` are decodes of the same request: without a drafter, with `sjd` over `WINDOW`
    codes, and with `chain-4` if there is a drafter.
    """
    costs = replace(costs, step=max(0.0, _seconds_per_step(plain) - costs.target.at(2)))
    redraft = max(0.0, (_seconds_per_step(window) - costs.window_seconds(WINDOW)) / WINDOW)
    level = 0.0
    if chain is not None:
        level = max(0.0, (_seconds_per_step(chain) - costs.tree_seconds(CHAIN + 1, [1] * CHAIN)) / CHAIN)
    return replace(costs, level=level, redraft=redraft)


def _seconds_per_step(steps: Iterator[object]) -> float:
    """Seconds of one step, over `STEPS` steps after the first three; the decode is left where it stands."""
    for _ in itertools.islice(steps, 3):
        pass
    began = time.perf_counter()
    taken = sum(1 for _ in itertools.islice(steps, STEPS))
    return (time.perf_counter() - began) / max(1, taken)
