"""A quick look at what steps cost here, for a request that is about to be decoded.

Pass times come from the engines alone; what happens around them comes from a few real steps of the request itself.
Does not choose.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

from ..manifest import Manifest
from ..runtime.engine import Engine
from .costs import HostCosts, measure_pass

STEPS = 8  # steps timed; the first ones, whose past is short, are left out
CHAIN = 4


def measure_costs(manifest: Manifest, target: Engine, drafter: Engine, rows: int, seconds: float) -> HostCosts:
    """Cost curves of both engines at a past of half an image; nothing around them yet."""
    past = manifest.condition.prefix + manifest.codes_per_image // 2
    spec = manifest.target
    curves = [
        measure_pass(engine, rows, past, spec.width, spec.vocabulary, drafts, seconds / 2)
        for engine, drafts in ((target, False), (drafter, True))
    ]
    return HostCosts(curves[0], curves[1], 0.0, 0.0)


def with_overhead(costs: HostCosts, plain: Iterator[object], chain: Iterator[object]) -> HostCosts:
    """The costs with what a step and a drafter pass take outside the engines.

    `plain` and `chain` are decodes of the same request, without a drafter and with `chain-4`.
    """
    step = max(0.0, _seconds_per_step(plain) - costs.target.at(2))
    drafting = _seconds_per_step(chain) - step - costs.target.at(CHAIN + 1) - CHAIN * costs.drafter.at(2)
    return HostCosts(costs.target, costs.drafter, step, max(0.0, drafting / CHAIN))


def _seconds_per_step(steps: Iterator[object]) -> float:
    """Seconds of one step, over `STEPS` steps after the first three; the decode is left where it stands."""
    for _ in itertools.islice(steps, 3):
        pass
    began = time.perf_counter()
    taken = sum(1 for _ in itertools.islice(steps, STEPS))
    return (time.perf_counter() - began) / max(1, taken)
