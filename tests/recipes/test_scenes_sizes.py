"""The scenes recipe in other sizes: one choice when the target is trained, and everything after it follows."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from refusals import refused
from safetensors.torch import load_file

from lantern_rt import CheckpointError, Pipeline, RequestError, open_bundle

torch = pytest.importorskip("torch")

from lantern_rt.export.models.decoder import DecoderConfig  # noqa: E402
from lantern_rt.export.models.eagle import EagleDrafter  # noqa: E402
from lantern_rt.train.drafter.figures import default_relaxation  # noqa: E402
from lantern_rt.train.drafter.folder import save_drafter as save_folder  # noqa: E402
from lantern_rt.train.muon import Muon  # noqa: E402
from lantern_rt.train.precision import fast_in_bfloat16, mixed_precision  # noqa: E402
from recipes.scenes.bundle import write_scenes_bundle  # noqa: E402
from recipes.scenes.checkpoints import save_checkpoint  # noqa: E402
from recipes.scenes.drafter import train_drafter, undrafted_bundle, write_samples  # noqa: E402
from recipes.scenes.model import CONFIG, SIZES, ScenesTarget, find_size  # noqa: E402
from recipes.scenes.restore import restore_work  # noqa: E402
from recipes.scenes.target import load_target, token_losses, train_target  # noqa: E402
from recipes.scenes.text import SLOTS  # noqa: E402

CODES = open_bundle("scenes").manifest.codebook_size
SMALL = replace(
    CONFIG, vocab_size=CODES, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=4, intermediate_size=96
)


def codebook(codes: int = CODES) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(codes, 8), dim=1)


def save_target(work: Path, config: DecoderConfig) -> ScenesTarget:
    target = ScenesTarget(codebook(), config)
    save_checkpoint(work / "target.pt", {"model": target.state_dict(), "seen": 0, "config": asdict(config)})
    return target


def save_drafter(work: Path, config: DecoderConfig) -> EagleDrafter:
    own = replace(config, num_layers=1, prefix=SLOTS - 1, input_norm=False, final_norm=False)
    drafter = EagleDrafter(own, torch.nn.Linear(own.hidden_size, own.vocab_size, bias=False), bias=True)
    save_folder(drafter, work / "drafter", {})
    return drafter


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A work folder with nothing but the tokenizer."""
    restore_work("scenes", tmp_path / "work", only_vq=True)
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["vq.pt"]
    return tmp_path / "work"


def test_a_work_folder_of_another_size_becomes_a_bundle_and_comes_back_from_it(work: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    target, drafter = save_target(work, SMALL), save_drafter(work, SMALL)
    write_scenes_bundle(work, tmp_path / "bundle", force=False, progress=lambda *_: None)
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert manifest.name == "bundle"
    assert (manifest.target.hidden_size, manifest.target.num_layers, manifest.target.head_dim) == (64, 2, 16)
    restore_work(tmp_path / "bundle", tmp_path / "again")
    again = load_target(tmp_path / "again")
    assert again.config == SMALL
    captions, codes = torch.randint(1, 60, (2, SLOTS)), torch.randint(CODES, (2, 256))
    difference = token_losses(again, captions, codes) - token_losses(target, captions, codes)
    assert difference.abs().max() < 0.01  # weights are rounded to float16 on the way
    stored = load_file(tmp_path / "again" / "drafter" / "model.safetensors")
    torch.testing.assert_close(stored["fc.weight"], drafter.fc.weight.detach().half().float())
    assert stored["layers.0.mlp.up_proj.weight"].shape == (96, 64)


def test_going_on_with_a_target_in_another_size_is_refused(work: Path) -> None:
    save_target(work, SMALL)
    with refused(CheckpointError, f"{work / 'target.pt'}: found", "64x2, expected llamagen-b", "another --work"):
        train_target(work, minutes=0, size=SIZES["llamagen-b"])


def test_a_drafter_of_another_size_than_the_target_is_refused(work: Path, tmp_path: Path) -> None:
    save_target(work, SMALL)
    save_drafter(work, replace(SMALL, hidden_size=128))
    found = f"the drafter has {CODES} codes of width 128, the target {CODES} of 64"
    with refused(CheckpointError, f"{work / 'drafter'}: {found}"):
        write_scenes_bundle(work, tmp_path / "bundle", force=False, progress=lambda *_: None)


def test_the_drafter_is_trained_on_what_the_target_draws(work: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_target(work, SMALL)
    bundle = undrafted_bundle(work)
    assert bundle.manifest.drafter is None
    assert default_relaxation(bundle.manifest) == (10, 1.5)  # what figures and losses of the drafter are of
    assert undrafted_bundle(work).digest == bundle.digest
    write_samples(work, 2, shard=2, threads=1)
    found = train_drafter(work, steps=1, batch=1)
    assert 0 < found["overlap"] < 1
    write_scenes_bundle(work, tmp_path / "bundle", force=False, progress=lambda *_: None)
    with Pipeline.from_bundle(tmp_path / "bundle", threads=1) as pipeline:
        plain, drafted = (pipeline("a red cube", method=method) for method in ("ar", "eagle"))
    assert (plain.codes[0] == drafted.codes[0]).all()
    save_target(work, SMALL)  # another one
    assert undrafted_bundle(work).digest != bundle.digest


def test_a_work_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with refused(CheckpointError, f"{tmp_path / 'vq.pt'}: is not there", "train it", "`restore`"):
        train_target(tmp_path, minutes=0)


def test_a_size_of_another_name_is_refused() -> None:
    with refused(RequestError, "size: found 'xl', expected one of default, llamagen-b"):
        find_size("xl")


def test_training_keeps_everything_on_one_device() -> None:
    """On a device without data, which no operation mixes with the host's."""
    target = ScenesTarget(codebook(), SMALL).to("meta")
    captions, codes = (torch.zeros(2, count, dtype=torch.int64, device="meta") for count in (SLOTS, 256))
    losses = token_losses(target, captions, codes, torch.zeros(2, dtype=torch.bool, device="meta"))
    losses.mean().backward()
    Muon([weight for weight in target.decoder.parameters() if weight.ndim == 2], 0.02).step()
    assert losses.device.type == "meta"


def test_in_bfloat16_the_loss_is_about_the_same() -> None:
    torch.manual_seed(0)
    target = ScenesTarget(codebook(), SMALL)
    captions, codes = torch.randint(1, 60, (2, SLOTS)), torch.randint(CODES, (2, 256))
    exact = token_losses(target, captions, codes)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = token_losses(target, captions, codes)
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().mean() < 0.05
    with mixed_precision("cpu"):
        found = token_losses(target, captions, codes)
    assert torch.equal(found, rounded if fast_in_bfloat16("cpu") else exact)
