"""What the image decoder runs on: asked for, or found by tune on a clock that is scripted, stored and used."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refused
from tiny_bundle import make_tiny_bundle

from lantern_rt import EngineError, Pipeline, RequestError
from lantern_rt.cli.main import run_program
from lantern_rt.engines.ort.providers import PROVIDERS, Provider
from lantern_rt.engines.ort.session import GraphSession
from lantern_rt.planning.store import PictureChoice, Tuning, read_tuning, write_tuning
from lantern_rt.tuning import pictures
from lantern_rt.tuning.pictures import Decoder, Decoders, choose_decoder, compare_decoders

TWIN = Provider("twin", "CPUExecutionProvider", "onnxruntime", {})  # a second name of what is always there


@dataclass
class Host:
    """Only image decoders take time: `cost` seconds by provider. added: to what the twin decodes, in levels of 255."""

    cost: dict[str, float] = field(default_factory=lambda: {"cpu": 0.03, "twin": 0.01})
    added: float = 0.0
    now: float = 1000.0


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host, real = Host(), GraphSession.run

    def run(session: GraphSession, feeds: Any) -> Any:
        found = real(session, feeds)
        if "codes" not in feeds:
            return found
        host.now += host.cost[session.provider]
        return [found[0] + host.added / 127.5] if session.provider == "twin" else found

    monkeypatch.setattr(GraphSession, "run", run)
    monkeypatch.setitem(PROVIDERS, "twin", TWIN)
    monkeypatch.setattr(pictures, "host_plugins", lambda _: (["twin"], ["absent"]))
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: host.now)
    return host


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("pictures") / "tiny")


def compared(folder: Path, host: Host, seconds: float = 1.0, deadline: float = 60.0) -> Decoders:
    codes = [np.arange(3), np.arange(2)]  # cut off: the last one is taken for the rest
    return compare_decoders(Pipeline.from_bundle(folder, threads=1), codes, seconds, host.now + deadline)


def test_the_decoder_that_is_faster_and_as_good_is_chosen(folder: Path, host: Host) -> None:
    found = compared(folder, host)
    (twin,) = found.compared
    assert (twin.provider, twin.seconds, twin.difference) == ("twin", pytest.approx(0.01), 0.0)
    assert twin.speed_ups == pytest.approx([3.0] * len(twin.speed_ups))
    assert found.choice is not None
    assert (found.choice.provider, found.choice.threads, found.choice.speed_up) == ("twin", 1, pytest.approx(3.0))
    assert (found.doubt, found.missing) == ("", ["absent"])


def test_a_decoder_whose_pictures_differ_by_more_than_a_level_is_not_chosen(folder: Path, host: Host) -> None:
    host.added = 0.9
    near = compared(folder, host)
    assert near.choice is not None
    assert near.choice.provider == "twin"
    assert 0 < near.choice.difference <= 1
    for host.added in (2.0, float("nan")):
        far = compared(folder, host)
        assert far.choice is not None
        assert far.choice.provider == "cpu"
        assert far.compared[0].difference > 1.5


def test_a_decoder_that_gains_little_is_not_chosen(folder: Path, host: Host) -> None:
    host.cost["twin"] = 0.028
    found = compared(folder, host)
    assert found.choice is not None
    assert found.choice.provider == "cpu"


def test_too_little_time_chooses_nothing(folder: Path, host: Host) -> None:
    found = compared(folder, host, deadline=0.15)
    assert found.choice is None
    assert found.doubt == "there was too little time, or the host is too busy; give more --minutes"


def test_without_codes_or_plugins_nothing_is_compared(
    folder: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = Pipeline.from_bundle(folder, threads=1)
    assert compare_decoders(pipe, [], 1.0, host.now + 60).choice is None
    monkeypatch.setattr(pictures, "host_plugins", lambda _: ([], ["absent"]))
    assert compare_decoders(pipe, [np.arange(3)], 1.0, host.now + 60) == Decoders(None, "", [], ["absent"])


@pytest.mark.parametrize("fails", ["session.check_taken", "session.GraphSession.run"])
def test_a_plugin_that_does_not_take_the_decoder_or_fails_counts_as_missing(
    folder: Path, host: Host, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    real = GraphSession.run

    def taken(where: object, provider: Provider, session: object) -> None:
        if provider.name == "twin":
            raise EngineError(f"{where}: provider twin does not take 2 nodes of this graph")

    def run(session: GraphSession, feeds: Any) -> Any:
        if session.provider == "twin":
            raise EngineError(f"{session.path}: ONNX Runtime failed to run the graph")
        return real(session, feeds)

    monkeypatch.setattr(f"lantern_rt.engines.ort.{fails}", taken if fails.endswith("taken") else run)
    found = compared(folder, host)
    assert (found.compared, found.missing) == ([], ["absent", "twin"])
    assert (found.choice, found.doubt) == (None, "")


def test_where_turns_disagree_nothing_is_chosen() -> None:
    steady = Decoder("steady", 0.02, [1.5] * 9, 0.1)
    wild = Decoder("wild", 0.01, [0.5, 9.0] * 4, 0.1)
    assert choose_decoder([wild], 1) is None
    chosen = choose_decoder([wild, steady], 2)
    assert chosen is not None
    assert (chosen.provider, chosen.threads, chosen.speed_up) == ("steady", 2, 1.5)


# ---------------------------------------------------------------- stored


def stored(pipe: Pipeline, provider: str) -> None:
    choice = PictureChoice(provider=provider, threads=1, speed_up=3.0, difference=0.2, date="2026-01-02")
    write_tuning(Tuning(bundle_digest=pipe.bundle.digest, picture=choice))


def test_the_stored_choice_is_used_where_nobody_says_otherwise(folder: Path, host: Host) -> None:
    on_cpu = Pipeline.from_bundle(folder, threads=1)
    stored(on_cpu, "twin")
    tuned = Pipeline.from_bundle(folder, threads=1)
    assert tuned.engines.picture_backend == "onnxruntime-twin"
    assert tuned.engines.backend == "onnxruntime-cpu"  # what methods are chosen for
    host.added = 3.0
    pipes = {name: Pipeline.from_bundle(folder, threads=1, provider=name) for name in ("cpu", "vq_decoder=twin")}
    results = {name: pipe("red sphere", method="ar") for name, pipe in {**pipes, "tuned": tuned}.items()}
    codes = [result.codes[0].tolist() for result in results.values()]
    assert codes[0] == codes[1] == codes[2]
    levels = {name: np.asarray(result.images[0], int) for name, result in results.items()}
    assert np.abs(levels["tuned"] - levels["cpu"]).max() == 3
    np.testing.assert_array_equal(levels["tuned"], levels["vq_decoder=twin"])
    assert tuned.engines.picture_backend != pipes["cpu"].engines.picture_backend == "onnxruntime-cpu"


def test_a_stored_choice_that_is_gone_is_ignored_and_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored(Pipeline.from_bundle(folder, threads=1), "removed")
    with caplog.at_level(logging.WARNING):
        assert Pipeline.from_bundle(folder, threads=1).engines.picture_backend == "onnxruntime-cpu"
    assert "what is stored for the image decoder is ignored: provider: found 'removed', expected one of" in caplog.text


def test_engines_keep_the_decoder_they_were_built_with(folder: Path, host: Host, tmp_path: Path) -> None:
    stored(Pipeline.from_bundle(folder, threads=1), "twin")
    engines = tmp_path / "engines"
    assert run_program(["build-engine", str(folder), "--output", str(engines)]) == 0
    assert Pipeline.from_bundle(folder, threads=1, engines=engines).engines.picture_backend == "onnxruntime-cpu"
    with refused(RequestError, "provider: found cpu,vq_decoder=twin, but ", "was built for cpu; leave the provider"):
        Pipeline.from_bundle(folder, engines=engines, provider=["cpu", "vq_decoder=twin"])


# ---------------------------------------------------------------- commands


def test_tune_tells_and_stores_what_the_decoder_runs_on(
    folder: Path, host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: _later(host))
    (prompts := tmp_path / "prompts.txt").write_text("red sphere\n")
    arguments = ["tune", str(folder), "--minutes", "0.05", "--threads", "1", "--prompts", str(prompts)]
    assert run_program([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["image_decoder"]
    assert report["choice"]["provider"] == "twin"
    assert [one["provider"] for one in report["compared"]] == ["twin"]
    assert report["missing"] == ["absent"]
    digest = Pipeline.from_bundle(folder, threads=1).bundle.digest
    kept = read_tuning(digest).picture
    assert kept is not None
    assert kept.model_dump() == report["choice"]
    assert run_program(arguments) == 0
    out = capsys.readouterr().out
    assert "image decoder, not tried as not installed here: absent (docs/gpu.md)" in out
    assert "image decoder: twin, speed-up 2.9" in out or "image decoder: twin, speed-up 3.0" in out
    assert run_program([*arguments, "--provider", "cpu", "--json"]) == 0  # it is said what runs it
    assert json.loads(capsys.readouterr().out)["image_decoder"] is None


def _later(host: Host) -> float:
    """Every look at the clock finds it 0.3 ms later."""
    host.now += 3e-4
    return host.now


def test_doctor_says_what_was_found_for_embedded_bundles(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = Pipeline.from_bundle("scenes", threads=1)
    assert run_program(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["image_decoders"] == {}
    stored(pipe, "twin")
    assert run_program(["doctor"]) == 0
    assert "scenes: twin, speed-up 3.00, pictures differ by 0.20 of 255 levels" in capsys.readouterr().out
    assert run_program(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["image_decoders"]["scenes"]["provider"] == "twin"
