"""`lantern-rt train-drafter` from a bundle to a drafter that decoding takes, and going on with what was interrupted."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from lantern_rt import CheckpointError, OutputError, Pipeline, RequestError, open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.compare.turns import Subjects

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")

from safetensors.torch import load_file  # noqa: E402

from lantern_rt.export.models.eagle import EagleDrafter  # noqa: E402
from lantern_rt.train.drafter.batches import Batches, chosen_pictures  # noqa: E402
from lantern_rt.train.drafter.borrowed import Borrowed, read_borrowed  # noqa: E402
from lantern_rt.train.drafter.data import Job, drawing_jobs, write_shards  # noqa: E402
from lantern_rt.train.drafter.fit import Fit, Options, state_path  # noqa: E402
from lantern_rt.train.drafter.folder import lantern_weights  # noqa: E402
from lantern_rt.train.drafter.parallel import Workers  # noqa: E402
from lantern_rt.train.drafter.shards import Data  # noqa: E402

DATA = Path(__file__).parent.parent / "data"
OPTIONS = Options(6, batch=4, depths=2, cfg_scale=4.0)


@pytest.fixture(scope="module")
def shards(c2i_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighty pictures of ten classes, with hidden states."""
    folder = tmp_path_factory.mktemp("drafter") / "data"
    drawing = ["data", str(c2i_bundle), "--images", "80", "--shard", "40", "--states", "--threads", "1"]
    assert run_program(["train-drafter", *drawing, "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def borrowed(c2i_bundle: Path) -> Borrowed:
    return read_borrowed(open_bundle(c2i_bundle))


def fit(shards: Path, borrowed: Borrowed, bundle: Path, output: Path, options: Options = OPTIONS) -> Fit:
    return Fit(Data(shards, borrowed.weights), borrowed, open_bundle(bundle).manifest, options, output)


def nothing(*_: object) -> None:
    pass


def same_weights(first: EagleDrafter, second: EagleDrafter) -> bool:
    ours, theirs = lantern_weights(first), lantern_weights(second)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_trained_drafter_is_exported_and_drafts_the_pictures_of_plain_decoding(
    c2i_bundle: Path, shards: Path, borrowed: Borrowed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    before = fit(shards, borrowed, c2i_bundle, tmp_path / "none").figures()
    fitting = ["fit", str(c2i_bundle), "--data", str(shards), "--steps", "100", "--batch", "8"]
    assert run_program(["train-drafter", *fitting, "--output", str(tmp_path / "drafter")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'drafter'}\n"
    card = (tmp_path / "drafter" / "README.md").read_text()
    rows = dict(line.split(" | ") for line in card.splitlines() if line.count(" | ") == 1 and line[-1].isdigit())
    assert float(rows["overlap"]) > before["overlap"] + 0.05
    assert borrowed.weights in card
    target = ["--target", str(DATA / "llamagen-c2i/c2i_tiny.pt"), "--vq", str(DATA / "llamagen-vq/vq_tiny.pt")]
    target += ["--config", str(DATA / "llamagen-c2i/config.json")]
    exported = ["--drafter", str(tmp_path / "drafter"), "--output", str(tmp_path / "bundle")]
    assert run_program(["export", *target, *exported]) == 0
    with Pipeline.from_bundle(tmp_path / "bundle", threads=1) as pipeline:
        request = Subjects("class_ids", list(range(10))).request(0, 10)
        plain, drafted = (pipeline(**request, method=method) for method in ("ar", "eagle:tree=balanced-25"))
        np.testing.assert_array_equal(drafted.codes, plain.codes)
        assert drafted.stats.tokens_per_forward_pass > 1.25


def test_an_interrupted_fit_is_gone_on_with_and_ends_with_the_same_weights(
    c2i_bundle: Path, shards: Path, borrowed: Borrowed, tmp_path: Path
) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    options = replace(OPTIONS, caption_dropout=0.3)
    whole = fit(shards, borrowed, c2i_bundle, tmp_path / "whole", options)
    whole.run(nothing, nothing)
    with pytest.raises(KeyboardInterrupt):
        fit(shards, borrowed, c2i_bundle, tmp_path / "drafter", options).run(interrupt, nothing, every=0)
    assert [path.name for path in tmp_path.iterdir() if "drafter" in path.name] == ["drafter.training.pt"]
    again = fit(shards, borrowed, c2i_bundle, tmp_path / "drafter", options)
    assert again.step == 4
    said: list[str] = []
    again.run(nothing, said.append)
    assert said == [f"going on from step 4, saved in {tmp_path / 'drafter.training.pt'}"]
    assert same_weights(again.average, whole.average)
    assert same_weights(again.drafter, whole.drafter)
    names = ("config.json", "model.safetensors", "README.md")
    stored = [load_file(tmp_path / one / "model.safetensors") for one in ("whole", "drafter")]
    assert all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0])
    assert sorted(path.name for path in (tmp_path / "drafter").iterdir()) == sorted(names)


def test_going_on_with_other_options_is_refused_and_with_more_steps_it_is_not(
    c2i_bundle: Path, shards: Path, borrowed: Borrowed, tmp_path: Path
) -> None:
    fit(shards, borrowed, c2i_bundle, tmp_path / "drafter").run(nothing, nothing)
    state = state_path(tmp_path / "drafter")
    with refused(OutputError, "drafter: is there already"):
        fit(shards, borrowed, c2i_bundle, tmp_path / "drafter")
    (tmp_path / "drafter").rename(tmp_path / "elsewhere")
    with refused(CheckpointError, f"{state}: was saved with other options", "remove it to begin anew"):
        fit(shards, borrowed, c2i_bundle, tmp_path / "drafter", replace(OPTIONS, loss="tv"))
    assert fit(shards, borrowed, c2i_bundle, tmp_path / "drafter", replace(OPTIONS, steps=9)).step == 6
    state.write_bytes(state.read_bytes()[:1000])
    with refused(CheckpointError, f"{state}: expected the state of a fit", "remove it to begin anew"):
        fit(shards, borrowed, c2i_bundle, tmp_path / "drafter")


def test_a_full_disk_leaves_the_old_state_and_no_half_folder(
    c2i_bundle: Path, shards: Path, borrowed: Borrowed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = fit(shards, borrowed, c2i_bundle, tmp_path / "drafter")
    one._save()
    before = state_path(tmp_path / "drafter").read_bytes()

    def full(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with refused(OutputError, "drafter.training.pt: cannot be written (No space left on device)"):
        one.run(nothing, nothing)
    assert state_path(tmp_path / "drafter").read_bytes() == before
    monkeypatch.setattr(one, "_save", nothing)
    with refused(OutputError, "drafter: cannot be written (No space left on device)"):
        one.run(nothing, nothing)
    assert [path.name for path in tmp_path.iterdir()] == ["drafter.training.pt"]


@pytest.mark.parametrize("loss", ["tv", "tv-neighbors"])
def test_other_losses_run_too(c2i_bundle: Path, shards: Path, borrowed: Borrowed, tmp_path: Path, loss: str) -> None:
    options = replace(OPTIONS, steps=2, loss=loss, cfg_scale=1.0)  # type: ignore[arg-type]
    found = fit(shards, borrowed, c2i_bundle, tmp_path / "drafter", options).run(nothing, nothing)
    assert 0 < found["overlap"] < 1
    assert found["tokens per pass, relaxed, balanced-25"] >= 1


def test_hidden_states_that_are_not_stored_are_computed_alike(
    c2i_bundle: Path, shards: Path, borrowed: Borrowed, tmp_path: Path
) -> None:
    pipeline = Pipeline.from_bundle(c2i_bundle, threads=1)
    jobs = drawing_jobs(pipeline, Subjects("class_ids", list(range(10))), 40, 40)
    list(write_shards(pipeline, jobs, tmp_path / "data", False, nothing))
    bare, whole = Data(tmp_path / "data", borrowed.weights), Data(shards, borrowed.weights)
    with refused(CheckpointError, "has no hidden states", "--states"):
        Batches(bare, 0, 2, "cpu", None)
    numbers, dropped = [3, 17], frozenset([1])
    first = Batches(bare, 0, 2, "cpu", pipeline).batch(numbers, dropped)
    second = Batches(whole, 0, 2, "cpu", None).batch(numbers, dropped)
    torch.testing.assert_close(first.states, second.states, atol=2e-3, rtol=2e-3)
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.states[2], first.states[3])  # without its caption both rows are the unconditional one


def embeddings(bundle: Path) -> Subjects:
    condition = open_bundle(bundle).manifest.condition
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2, condition.prefix, condition.caption_dim or 0)).astype(np.float32)
    masks = np.arange(condition.prefix) < np.array([[3], [condition.prefix]])
    return Subjects("embeddings", list(zip(rows, masks, strict=True)))


@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("name", ["t2i_bundle", "anole_bundle"])
def test_drafters_of_texts_read_prefixes_as_decoding_does(
    name: str, states: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What a batch says of the last prefix slot and the codes, against the pipeline's own passes."""
    bundle = request.getfixturevalue(name)
    pipeline = Pipeline.from_bundle(bundle, threads=1)
    subjects = embeddings(bundle) if name == "t2i_bundle" else Subjects("prompts", ["a dog", "some long cat on a mat"])
    jobs: list[Job] = drawing_jobs(pipeline, subjects, 4, 2)
    list(write_shards(pipeline, jobs, tmp_path / "data", states, nothing))
    lent = read_borrowed(pipeline.bundle)
    data = Data(tmp_path / "data", lent.weights)
    batch = Batches(data, lent.code_offset, 2, "cpu", pipeline).batch([0, 1])
    request_ = pipeline.check(**subjects.request(0, 2), method="ar")
    prompts = list(pipeline.prefixes(pipeline.engines, request_.images))
    rows = [row for prompt in prompts for row in (prompt.cond, prompt.uncond)]
    for row, first, tokens in zip(rows, batch.first.tolist(), batch.tokens, strict=True):
        assert first == len(row.embeds) - 1
        wanted = np.zeros(first) if row.tokens is None else row.tokens[1:]
        np.testing.assert_array_equal(tokens[:first], wanted)
    assert (batch.tokens[:, -4:] >= lent.code_offset).any()
    one = Fit(
        data, lent, pipeline.bundle.manifest, replace(OPTIONS, steps=1, batch=2), tmp_path / "d", pipeline=pipeline
    )
    assert 0 < one.run(nothing, nothing)["overlap"] <= 1


def test_pictures_come_once_a_pass_in_orders_that_depend_on_the_seed() -> None:
    training = [2, 3, 5, 7, 11]
    found = chosen_pictures(training, 1, 0, 10)
    assert sorted(found[:5]) == sorted(found[5:]) == training
    assert found[:5] != found[5:]
    assert chosen_pictures(training, 1, 3, 4) == found[3:7]
    assert chosen_pictures(training, 2, 0, 10) != found


def test_a_batch_that_workers_cannot_share_is_refused(
    c2i_bundle: Path, shards: Path, borrowed: Borrowed, tmp_path: Path
) -> None:
    data, manifest = Data(shards, borrowed.weights), open_bundle(c2i_bundle).manifest
    with refused(RequestError, "batch: found 4, expected a multiple of the 3 workers"):
        Fit(data, borrowed, manifest, OPTIONS, tmp_path / "d", workers=Workers(0, 3))


@pytest.mark.slow
def test_workers_together_train_one_drafter(c2i_bundle: Path, shards: Path, tmp_path: Path) -> None:
    command = ["fit", str(c2i_bundle), "--data", str(shards), "--steps", "3", "--batch", "4"]
    command += ["--output", str(tmp_path / "drafter")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, "-m", "lantern_rt", "train-drafter", *command], env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["num_hidden_layers"] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--loss", "l2"], "--loss: found 'l2', expected kl, tv, tv-neighbors"),
        (["--caption-dropout", "2"], "--caption-dropout: found 2.0, expected 0.0 .. 1.0"),
        (["--batch", "0"], "--batch: found 0, expected a whole number 1 .."),
        (["--data", "/nowhere"], "/nowhere: found no shards; make some with `lantern-rt train-drafter data`"),
        (["--device", "cuda"], "--device: found 'cuda', which PyTorch"),
        (["--device", "quantum"], "--device: found 'quantum', which PyTorch"),
    ],
)
def test_what_fit_refuses_is_one_line(
    c2i_bundle: Path,
    shards: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = ["fit", str(c2i_bundle), "--data", str(shards), "--output", str(tmp_path / "d"), *options]
    assert run_program(["train-drafter", *command]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_without_torch_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "torch" else find(name, *a))
    assert run_program(["train-drafter", "fit", "scenes", "--data", "d", "--output", "o"]) == 2
    assert "torch is not installed; run `pip install 'lantern-rt[cpu,train]'`" in capsys.readouterr().err


def test_help_of_the_steps_shows_examples_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    for step in ("data", "fit"):
        assert run_program(["train-drafter", step, "--help"]) == 0
        assert f"lantern-rt train-drafter {step} " in capsys.readouterr().out
    assert run_program(["train-drafter", "dance"]) == 2
