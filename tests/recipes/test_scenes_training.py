"""Test training by the scenes recipe: other model sizes, and continuation after an interruption."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from refusals import catch_error
from safetensors.torch import load_file

from lantern_rt import CheckpointError, Pipeline, open_bundle

torch = pytest.importorskip("torch")

from lantern_rt.export.graph.precision import fake_quantize  # noqa: E402
from lantern_rt.export.models.decoder import DecoderConfig  # noqa: E402
from lantern_rt.export.models.eagle import EagleDrafter  # noqa: E402
from lantern_rt.train.drafter.folder import save_drafter as save_folder  # noqa: E402
from recipes.scenes import distil as distil_module  # noqa: E402
from recipes.scenes import reinforce as reinforce_module  # noqa: E402
from recipes.scenes import vq as vq_module  # noqa: E402
from recipes.scenes.bundle import write_scenes_bundle  # noqa: E402
from recipes.scenes.checkpoints import load_checkpoint, save_checkpoint  # noqa: E402
from recipes.scenes.distil import compute_kl_divergence, distil_guidance  # noqa: E402
from recipes.scenes.drafter import open_target_bundle, train_drafter, write_samples  # noqa: E402
from recipes.scenes.judge import RatedImage, SceneJudge, save_judge  # noqa: E402
from recipes.scenes.model import CONFIG, SIZES, ScenesTarget  # noqa: E402
from recipes.scenes.restore import restore_work_folder  # noqa: E402
from recipes.scenes.rounding import round_layer  # noqa: E402
from recipes.scenes.sharpen import sharpen_vq_decoder  # noqa: E402
from recipes.scenes.stopwatch import Stopwatch  # noqa: E402
from recipes.scenes.target import compute_token_losses, load_target, train_target  # noqa: E402
from recipes.scenes.text import SLOTS  # noqa: E402
from recipes.scenes.vocabulary import find_unnamed_attributes  # noqa: E402
from recipes.scenes.vq import VQ_SIZES, ScenesVQConfig, load_vq, train_vq  # noqa: E402

pytestmark = pytest.mark.usefixtures("bfloat16")
CODES = open_bundle("scenes").manifest.codebook_size
TINY_VQ = ScenesVQConfig(patch=1, codes=32, encoder=(32, 32), decoder=((32, 1),))
TINY = replace(CONFIG, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=32)
SMALL = replace(
    CONFIG, vocab_size=CODES, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=4, intermediate_size=96
)


class FakeStopwatch(Stopwatch):
    """A stopwatch that advances by one second at every call of `seconds`."""

    def __init__(self, device: str, before: float = 0.0) -> None:
        self.passed = before

    def seconds(self) -> float:
        self.passed += 1
        return self.passed


@pytest.fixture(autouse=True)
def fake_stopwatch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in ("vq", "target", "sharpen", "distil", "reinforce"):
        monkeypatch.setattr(f"recipes.scenes.{module}.Stopwatch", FakeStopwatch)
    monkeypatch.setattr(vq_module, "POOL", 8)
    monkeypatch.setattr(vq_module, "SEATED", 2)
    yield
    torch.set_flush_denormal(False)  # other tests need denormal numbers


@pytest.fixture
def work_folder(tmp_path: Path) -> Path:
    train_vq(tmp_path / "work", minutes=0.2, batch=4, config=TINY_VQ)
    return tmp_path / "work"


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    restore_work_folder("scenes", tmp_path / "work", only_vq=True)
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["vq.pt"]
    return tmp_path / "work"


def save_target(work_folder: Path, config: DecoderConfig) -> ScenesTarget:
    codebook = torch.nn.functional.normalize(torch.randn(config.vocab_size, 8), dim=1)
    target = ScenesTarget(codebook, config)
    save_checkpoint(work_folder / "target.pt", {"model": target.state_dict(), "seen": 0, "config": asdict(config)})
    return target


def save_drafter(work_folder: Path, config: DecoderConfig) -> EagleDrafter:
    drafter_config = replace(config, num_layers=1, prefix=SLOTS - 1, input_norm=False, final_norm=False)
    drafter = EagleDrafter(
        drafter_config, torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False), bias=True
    )
    save_folder(drafter, work_folder / "drafter", {})
    return drafter


def test_training_the_image_tokenizer_continues(work_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first_step = load_checkpoint(work_folder / "vq-state.pt")["step"]
    train_vq(work_folder, minutes=0.5, batch=4)
    assert load_checkpoint(work_folder / "vq-state.pt")["step"] > first_step > 2
    assert load_vq(work_folder).config == TINY_VQ
    capsys.readouterr()
    train_vq(work_folder, minutes=0.5, batch=4)
    assert capsys.readouterr().out == "vq has had its 0.5 minutes\n"


def test_a_work_folder_of_another_model_is_rejected(tokenizer_folder: Path, tmp_path: Path) -> None:
    save_target(tokenizer_folder, SMALL)
    save_drafter(tokenizer_folder, replace(SMALL, hidden_size=128))
    with pytest.raises(CheckpointError, match=r"shape \[2048, 128\], expected \[2048, 64\]"):
        write_scenes_bundle(tokenizer_folder, tmp_path / "bundle", force=False, progress=lambda *_: None)
    invalid_calls = {  # keys: the file that the error names
        "vq.pt": lambda: train_vq(tokenizer_folder, minutes=1, config=TINY_VQ),
        "target.pt": lambda: train_target(tokenizer_folder, minutes=0, target_config=SIZES["llamagen-b"]),
        "none/vq.pt": lambda: train_target(tokenizer_folder / "none", minutes=0),
    }
    for name, train in invalid_calls.items():
        assert catch_error(CheckpointError, train).field == str(tokenizer_folder / name)


def test_sharpening_changes_only_the_image_decoder(work_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.scenes.sharpen.ALONE", 2)
    before = load_vq(work_folder).state_dict()
    sharpen_vq_decoder(work_folder, minutes=0.3, batch=4)
    state = load_checkpoint(work_folder / "sharpen-state.pt")
    sharpen_vq_decoder(work_folder, minutes=0.5, batch=4)
    assert load_checkpoint(work_folder / "sharpen-state.pt")["step"] > state["step"] > 2
    after = load_vq(work_folder).state_dict()
    changed_parts = {name.split(".")[0] for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert changed_parts == {"decoder"}


def test_training_of_a_target_continues_after_an_interruption(
    work_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(minutes: float) -> dict[str, object]:
        train_target(work_folder, minutes, cooldown=0.5, batch=4, target_config=TINY, shard_size=16)
        return load_checkpoint(work_folder / "target-state.pt")

    state = train(0.3)
    assert load_target(work_folder).config == replace(TINY, vocab_size=32)
    interrupted_state = state | {"seconds": 12.0}  # less than 0.3 minutes
    save_checkpoint(work_folder / "target-state.pt", interrupted_state)
    continued_state = train(0.3)
    assert continued_state["step"] > state["step"]
    capsys.readouterr()
    train(0.3)
    assert capsys.readouterr().out == "target has had its 0.3 minutes\n"
    save_checkpoint(work_folder / "target-stable.pt", interrupted_state | {"step": 1000})
    # With more minutes, training continues from the checkpoint before the learning rate decreased.
    assert train(0.4)["step"] > 1000


def test_a_student_learns_the_guided_logits_of_the_teacher(
    work_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bfloat16: bool
) -> None:
    for name, value in (("SCENES", 32), ("BLANK", 0.2)):
        monkeypatch.setattr(distil_module, name, value)
    torch.manual_seed(0)
    teacher = save_target(work_folder, replace(TINY, vocab_size=32))
    captions, codes, blank, guided_logits = distil_module.make_distillation_data(work_folder, teacher, "cpu")
    assert 0 < blank.sum() < 32
    with torch.no_grad():
        conditional, unconditional = (teacher.logits(captions, codes, rows) for rows in (blank, blank | True))
    guided = torch.where(blank[:, None, None], unconditional, 3 * conditional - 2 * unconditional)
    rounding = 0.3 if bfloat16 else 1e-3  # logits are from -4 to 4, and guidance multiplies their rounding by five
    torch.testing.assert_close(guided_logits.float(), guided, rtol=1e-3, atol=rounding)
    divergences = [compute_kl_divergence(guided_logits, conditional)]
    steps = []
    for minutes in (2, 4):
        distil_guidance(work_folder, minutes, lr=0.03)
        steps.append(load_checkpoint(work_folder / "distil-state.pt")["step"])
        divergences.append(
            compute_kl_divergence(guided_logits, load_target(work_folder).logits(captions, codes, blank).detach())
        )
    assert divergences[2] < 0.9 * divergences[1] < 0.8 * divergences[0], divergences
    assert steps[1] > 1.5 * steps[0] > 40
    torch.testing.assert_close(load_target(work_folder, "guided.pt").state_dict(), teacher.state_dict())
    distil_guidance(work_folder, 4)
    assert capsys.readouterr().out.endswith("the student has had its 4 minutes\n")


def test_images_drawn_for_reinforcement_follow_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reinforce_module, "TEMPERATURE", 1e-7)  # so low that the most likely code is drawn
    torch.manual_seed(0)
    target = ScenesTarget(torch.randn(32, 8), replace(TINY, vocab_size=32)).eval()
    captions = torch.randint(2, 50, (3, SLOTS))
    codes = reinforce_module.sample_codes(target, captions)
    logits = target.logits(captions, codes)
    chosen = logits.gather(-1, codes[..., None])[..., 0]
    torch.testing.assert_close(chosen, logits.amax(-1))
    assert len(codes.unique()) > 3


def test_reinforcement_makes_rewarded_images_more_likely(
    work_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = []
    sample_codes = reinforce_module.sample_codes

    def remember_codes(*arguments: torch.Tensor) -> torch.Tensor:
        drawn.append(sample_codes(*arguments))
        return drawn[-1]

    def rate_low_codes(*_: object) -> list[RatedImage]:
        return [RatedImage(float(share), "night", "left") for share in (drawn[-1] < 16).float().mean(1)]

    monkeypatch.setattr(reinforce_module, "sample_codes", remember_codes)
    monkeypatch.setattr(reinforce_module, "rate_images", rate_low_codes)
    torch.manual_seed(0)
    first = save_target(work_folder, replace(TINY, vocab_size=32))
    no_judges = catch_error(CheckpointError, lambda: reinforce_module.reinforce_target(work_folder, 1))
    assert no_judges.field == "judge-*.onnx"
    save_judge(SceneJudge(), work_folder / "judge-1.onnx")
    reinforce_module.reinforce_target(work_folder, minutes=0.5, images=64, lr=0.003)
    shares = [(codes < 16).float().mean().item() for codes in drawn]
    assert shares[-1] > shares[0] + 0.1, shares
    assert "reinforce done" in capsys.readouterr().out
    assert not torch.equal(load_target(work_folder).slots, first.slots)


def test_skies_and_places_that_were_rare_are_rewarded() -> None:
    scenes, captions = reinforce_module.sample_groups(60, np.random.default_rng(0))
    ratings = [RatedImage(1.0, "night" if i % 8 else "clear", "left" if i % 8 else "right") for i in range(len(scenes))]
    spreads = {"sky": {"clear": 0.0, "night": 0.0}, "position": {"left": 0.0, "right": 0.0}}
    bonus = reinforce_module.compute_spread_bonus(ratings, scenes, captions, spreads)
    unnamed = [find_unnamed_attributes(*pair) for pair in zip(scenes, captions, strict=True)]
    silent = torch.tensor([bool(names & {"sky", "position"}) for names in unnamed])
    rare = torch.arange(len(scenes)) % 8 == 0
    assert (bonus[~silent] == 0).all()
    assert bonus[silent & rare].min() > 0.1 > 0 > bonus[silent & ~rare].max()


def test_a_target_of_another_size_is_exported_and_restored(tokenizer_folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = save_target(tokenizer_folder, SMALL)
    bundle = open_target_bundle(tokenizer_folder)
    assert bundle.manifest.drafter is None
    assert open_target_bundle(tokenizer_folder).digest == bundle.digest
    write_samples(tokenizer_folder, 2, images_per_shard=2, threads=1)
    assert 0 < train_drafter(tokenizer_folder, steps=1, batch=1)["overlap"] < 1
    write_scenes_bundle(tokenizer_folder, tmp_path / "bundle", force=False, progress=lambda *_: None)
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert (manifest.name, manifest.target.hidden_size, manifest.target.num_layers) == ("bundle", 64, 2)
    with Pipeline.from_bundle(tmp_path / "bundle", threads=1) as pipeline:
        expected, result = (pipeline("a red cube", method=method) for method in ("ar", "eagle"))
    assert (result.codes[0] == expected.codes[0]).all()
    restore_work_folder(tmp_path / "bundle", tmp_path / "again")
    restored = load_target(tmp_path / "again")
    assert restored.config == SMALL
    captions = torch.randint(1, 60, (2, SLOTS))
    codes = torch.randint(CODES, (2, 256))
    difference = compute_token_losses(restored, captions, codes) - compute_token_losses(target, captions, codes)
    assert difference.abs().max() < 0.01  # the bundle stores weights in float16
    trained, stored = (
        load_file(folder / "drafter" / "model.safetensors") for folder in (tokenizer_folder, tmp_path / "again")
    )
    torch.testing.assert_close(stored["fc.weight"], trained["fc.weight"].half().float())
    save_target(tokenizer_folder, SMALL)  # other weights, so that the bundle is exported again
    assert open_target_bundle(tokenizer_folder).digest != bundle.digest


def test_a_tokenizer_of_another_size_is_restored_from_its_bundle(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = replace(VQ_SIZES["128"], codes=64)
    vq = vq_module.ScenesVQ(config)
    for weight in vq.parameters():
        weight.data += 0.01 * torch.randn_like(weight)  # the export removes weights that are all zero
    save_checkpoint(tmp_path / "work" / "vq.pt", {"model": vq.state_dict(), "config": asdict(config)})
    save_target(tmp_path / "work", replace(TINY, vocab_size=64))
    save_drafter(tmp_path / "work", replace(TINY, vocab_size=64))
    write_scenes_bundle(tmp_path / "work", tmp_path / "bundle", force=False, progress=lambda *_: None)
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert (manifest.image_height, manifest.codebook_size, manifest.target.vocab_size) == (128, 64, 64)
    restore_work_folder(tmp_path / "bundle", tmp_path / "again")
    assert load_vq(tmp_path / "again").config == config


def test_round_layer_has_less_error_than_rounding_to_nearest() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3, 200, 8) @ torch.randn(8, 32)
    layer = torch.nn.Linear(32, 24, bias=False)
    exact = layer(inputs)
    nearest = inputs @ fake_quantize(layer.weight, "columns", True).T
    rounded_outputs = round_layer(layer, inputs)
    assert (rounded_outputs - exact).norm() < 0.6 * (nearest - exact).norm()
    torch.testing.assert_close(fake_quantize(layer.weight, "columns", True), layer.weight, rtol=1e-6, atol=0)
