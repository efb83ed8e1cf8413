"""The scenes recipe at 256 pixels, and training that is interrupted and goes on."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from lantern_rt import CheckpointError, RequestError, open_bundle

torch = pytest.importorskip("torch")

from recipes.scenes import vq as vq_module  # noqa: E402
from recipes.scenes.bundle import write_scenes_bundle  # noqa: E402
from recipes.scenes.checkpoints import load_checkpoint, save_checkpoint  # noqa: E402
from recipes.scenes.data import draw_scenes, render_scenes  # noqa: E402
from recipes.scenes.drafter import train_drafter, write_samples  # noqa: E402
from recipes.scenes.judge import judge_accuracy, load_judge  # noqa: E402
from recipes.scenes.model import CONFIG, ScenesTarget  # noqa: E402
from recipes.scenes.restore import restore_work  # noqa: E402
from recipes.scenes.sharpen import train_sharpen  # noqa: E402
from recipes.scenes.stopwatch import Stopwatch  # noqa: E402
from recipes.scenes.target import load_target, train_target  # noqa: E402
from recipes.scenes.vq import VQ_SIZES, VQConfig, find_vq_size, load_vq, train_vq  # noqa: E402

TINY_VQ = VQConfig(patch=1, codes=32, encoder=(32, 32), decoder=((32, 1),))
TINY = replace(CONFIG, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=32)


class Clock(Stopwatch):
    """A second passes whenever it is looked at."""

    def __init__(self, device: str, before: float = 0.0) -> None:
        self.passed = before

    def seconds(self) -> float:
        self.passed += 1
        return self.passed


@pytest.fixture(autouse=True)
def clocked(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("vq", "target", "sharpen"):
        monkeypatch.setattr(f"recipes.scenes.{module}.Stopwatch", Clock)
    monkeypatch.setattr(vq_module, "POOL", 8)
    monkeypatch.setattr(vq_module, "SEATED", 2)


def test_larger_pictures_show_the_same_scenes() -> None:
    scenes = draw_scenes(6, seed=5)
    small, large = render_scenes(scenes) / 255, render_scenes(scenes, 256) / 255
    averaged = large.reshape(6, 128, 2, 128, 2, 3).mean((2, 4))
    assert np.abs(averaged - small).mean() < 0.01


def test_the_judge_reads_larger_pictures_too() -> None:
    scenes = draw_scenes(40, seed=915_000)
    assert min(judge_accuracy(load_judge(), scenes, render_scenes(scenes, 256)).values()) >= 0.9


def test_a_tokenizer_goes_on_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_vq(tmp_path, minutes=0.3, batch=4, config=TINY_VQ)
    first = load_checkpoint(tmp_path / "vq-state.pt")
    assert 2 < first["step"] < 12
    train_vq(tmp_path, minutes=0.5, batch=4)
    second = load_checkpoint(tmp_path / "vq-state.pt")
    assert second["step"] > first["step"]
    assert second["seconds"] > first["seconds"]
    assert load_vq(tmp_path).config == TINY_VQ
    capsys.readouterr()
    train_vq(tmp_path, minutes=0.5, batch=4)
    assert capsys.readouterr().out == "vq has had its 0.5 minutes\n"
    assert load_checkpoint(tmp_path / "vq-state.pt")["step"] == second["step"]


def test_codes_are_not_seated_again_in_a_tokenizer_from_a_bundle(tmp_path: Path) -> None:
    restore_work("scenes", tmp_path / "work", only_vq=True)
    before = load_vq(tmp_path / "work").codebook
    train_vq(tmp_path / "work", minutes=0.1, batch=2)
    after = load_vq(tmp_path / "work").codebook
    assert ((before * after).sum(1) > 0.9).float().mean() > 0.5


def test_a_tokenizer_of_another_size_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "vq.pt", {"config": asdict(TINY_VQ)})
    with refused(CheckpointError, f"{tmp_path / 'vq.pt'}: found", "64 pixels a side, expected 256", "another --work"):
        train_vq(tmp_path, minutes=1, config=find_vq_size("256"))
    with refused(RequestError, "size: found '512', expected one of 128, 256"):
        find_vq_size("512")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A work folder with a small tokenizer that has hardly learnt anything."""
    train_vq(tmp_path / "work", minutes=0.2, batch=4, config=TINY_VQ)
    return tmp_path / "work"


def test_sharpening_moves_the_decoder_and_no_code(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.scenes.sharpen.ALONE", 2)
    before = load_vq(work).state_dict()
    train_sharpen(work, minutes=0.3, batch=4)
    state = load_checkpoint(work / "sharpen-state.pt")
    train_sharpen(work, minutes=0.5, batch=4)
    assert load_checkpoint(work / "sharpen-state.pt")["step"] > state["step"] > 2
    after = load_vq(work).state_dict()
    moved = {name.split(".")[0] for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert moved == {"decoder"}


def test_a_target_goes_on_where_it_was_stopped(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train(minutes: float) -> dict[str, object]:
        train_target(work, minutes, cooldown=0.5, batch=4, size=TINY, shard=16)
        return load_checkpoint(work / "target-state.pt")

    first = train(0.3)
    assert load_target(work).config == replace(TINY, vocab_size=32)
    stopped = first | {"seconds": 12.0}  # as it was when the call was stopped
    save_checkpoint(work / "target-state.pt", stopped)
    second = train(0.3)
    assert second["step"] > first["step"]
    capsys.readouterr()
    train(0.3)
    assert capsys.readouterr().out == "target has had its 0.3 minutes\n"
    save_checkpoint(work / "target-stable.pt", stopped | {"seconds": 9.0})
    assert 9 < train(0.4)["seconds"] < 40  # more minutes go on from before the rate fell


def test_a_drafter_and_a_bundle_of_larger_pictures_follow_and_come_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = replace(VQ_SIZES["256"], codes=64)
    vq = vq_module.ScenesVQ(config)
    for weight in vq.parameters():
        weight.data += 0.01 * torch.randn_like(weight)  # a graph does not keep weights that are zero
    save_checkpoint(tmp_path / "work" / "vq.pt", {"model": vq.state_dict(), "config": asdict(config)})
    size = replace(TINY, vocab_size=64)
    target = ScenesTarget(vq.codebook, size)
    save_checkpoint(tmp_path / "work" / "target.pt", {"model": target.state_dict(), "config": asdict(size)})
    write_samples(tmp_path / "work", 2, shard=2, threads=1)
    train_drafter(tmp_path / "work", steps=1, batch=1)
    write_scenes_bundle(tmp_path / "work", tmp_path / "bundle", force=False, progress=lambda *_: None)
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert (manifest.image_height, manifest.codebook_size, manifest.target.vocab_size) == (256, 64, 64)
    restore_work(tmp_path / "bundle", tmp_path / "again")
    assert load_vq(tmp_path / "again").config == config
    assert load_target(tmp_path / "again").config == size
