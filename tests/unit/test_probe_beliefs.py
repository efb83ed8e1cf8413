"""What the probe of `auto` believes of a busy or slow host: nothing of passes that were not timed, or timed in vain."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from statistics_entries import statistics_of
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline
from lantern_rt.engines.ort.engine import OrtEngine
from lantern_rt.methods import MethodConfig, Sjd
from lantern_rt.planning.acceptance_statistics import AcceptanceStatistics, MethodStatistics, WindowTokens, weights_of
from lantern_rt.planning.auto import predicted_choice
from lantern_rt.planning.costs import HostCosts, with_overhead
from lantern_rt.planning.store import read_tuning

TOKENS = {3: 2.0, 7: 2.7, 31: 4.24}
PASSES = {2: 0.4, 8: 0.425, 16: 0.7, 32: 1.425, 64: 2.75}  # seconds by nodes: flat at first, as weights are read once


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """Only passes take time, as `PASSES` says."""
    now, real = [1000.0], OrtEngine.run

    def run(engine: OrtEngine, batch: Any, cache: Any) -> Any:
        seconds = float(np.interp(batch.positions.shape[1], list(PASSES), list(PASSES.values())))
        now[0] += seconds / (10 if batch.hidden is not None else 1)
        return real(engine, batch, cache)

    monkeypatch.setattr(OrtEngine, "run", run)
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: now[0])
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path / "cache"))
    return now


def entry() -> MethodStatistics:
    windows = tuple(WindowTokens(window=window, tokens=tokens) for window, tokens in TOKENS.items())
    return statistics_of(Sjd(neighbors=4, lambda_=1.5), tvd_per_token=0.02, windows=windows)


def true_gain(window: int) -> float:
    return TOKENS[window] * PASSES[2] / float(np.interp(window + 1, list(PASSES), list(PASSES.values())))


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("quality", ["balanced", "fast"])
def test_a_window_larger_than_any_pass_that_was_timed_is_not_believed(tmp_path: Path, quality: str) -> None:
    pipe = Pipeline.from_bundle(make_tiny_bundle(tmp_path / "tiny"), threads=1)
    weights = weights_of(pipe.bundle.manifest)
    pipe.chooser._brought = AcceptanceStatistics(format=4, weights=weights, entries=(entry(),))
    settings = pipe("red sphere", quality=quality).settings
    (probe,) = read_tuning(pipe.bundle.digest).probes.values()
    assert probe.steady
    assert max(probe.target) == 4, "there was time for two sizes"
    assert max(TOKENS, key=lambda window: TOKENS[window] / probe.window_seconds(window)) == 31, "by a flat line"
    assert true_gain(31) < 1.2
    assert "speed-up 1.96 by a short probe" in str(settings.choice)
    assert settings.method.parameters()["window"] == 3
    assert true_gain(3) == pytest.approx(2.0, rel=0.05)


def test_a_prediction_never_passes_what_was_timed() -> None:
    for most in (4, 8, 32, 64):
        costs = HostCosts({2: 0.16, most: 0.16}, None)
        found = predicted_choice((entry(),), costs, "fast")
        assert found is not None
        method = found[0].method
        assert isinstance(method, Sjd)
        assert method.window == max(window for window in TOKENS if window < most)


@pytest.mark.parametrize("faster", [1.0, 1.2, 3.0, 10.0])
def test_a_host_that_changes_much_while_it_is_probed_is_not_steady(clock: list[float], faster: float) -> None:
    """Busy while passes are timed and quiet while steps are: the work outside the passes must not vanish."""
    busy = HostCosts({2: 18e-3, 8: 21e-3, 32: 24e-3}, None)
    usual = {"ar": 20e-3, "sjd": 23e-3 + 7e-3}  # what steps would take then

    def decode(method: MethodConfig) -> Iterator[object]:
        while True:
            clock[0] += usual[method.method] / faster
            yield method

    def plain() -> None:
        clock[0] += 18e-3 / faster

    found = with_overhead(busy, plain, decode, 1.0)
    assert found.steady == (faster < 1.5)
    assert (found.step, found.redraft) == (pytest.approx(2e-3), pytest.approx(1e-3)), "they are at the pace of passes"
    if faster > 2:
        assert predicted_choice((entry(),), found, "fast") is None
