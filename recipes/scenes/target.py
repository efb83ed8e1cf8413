"""Training of the target of `scenes`, on an endless sequence of rendered scenes, with Muon and averaged weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lantern_rt.errors import CheckpointError
from lantern_rt.export.models.decoder import DecoderConfig
from lantern_rt.train.muon import Muon
from lantern_rt.train.precision import mixed_precision

from .checkpoints import load_checkpoint, save_checkpoint
from .data import render_scenes, sample_scenes
from .model import CONFIG, ScenesTarget, format_size_name
from .stopwatch import Stopwatch
from .text import UNKNOWN, encode_caption
from .vocabulary import write_caption
from .vq import CODE_DIM, GRID, ScenesVQ, load_vq

SHARD = 4000  # number of scenes in a shard, which are rendered and tokenised at a time
PASSES = 2  # number of epochs over a shard, each with other captions
FRESH_SEED = 900_000  # seed of scenes for measurements, which no training step uses
ROW_WEIGHT = torch.tensor([0.6] * 4 + [1.0] + [1.3] * 10 + [0.8])  # loss weight of each grid row; solids fill rows 5-14


def load_shard_codes(work_folder: Path, vq: ScenesVQ, shard_index: int, shard_size: int) -> NDArray[np.int16]:
    """Return the codes of a shard, int16 `[shard_size, 256]`. The first call renders the shard and saves its codes."""
    path = work_folder / f"codes-{shard_index:04d}.npy"
    if not path.exists():
        codes = tokenise_scenes(vq, shard_size, seed=shard_index + 10_000)
        partial = path.with_suffix(".partial.npy")
        np.save(partial, codes)
        partial.rename(path)
    stored: NDArray[np.int16] = np.load(path)
    return stored


def tokenise_scenes(vq: ScenesVQ, count: int, seed: int) -> NDArray[np.int16]:
    """Render the scenes of `sample_scenes(count, seed)` and return their codes, int16 `[count, 256]`."""
    scenes = sample_scenes(count, seed)
    size = vq.config.image_size
    parts = []
    for i in range(0, count, 1000):
        pictures = render_scenes(scenes[i : i + 1000], size, workers=torch.get_num_threads())
        with mixed_precision(vq.codebook.device):
            parts.append(vq.encode(pictures))
    return np.concatenate(parts)


def iterate_batches(
    work_folder: Path, vq: ScenesVQ, batch_size: int, num_skipped: int, shard_size: int = SHARD
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield training batches without end.

    Args:
        work_folder: folder of shards.
        vq: VQ tokenizer that encodes the scenes.
        batch_size: number of scenes per batch.
        num_skipped: number of scenes that earlier calls used. An epoch that was interrupted starts again.
        shard_size: number of scenes in a shard; the same for all calls on a work folder.

    Yields:
        Word ids of captions `[batch_size, 24]`, codes `[batch_size, 256]`, and the number of scenes used so far.
    """
    for done in itertools.count(num_skipped // shard_size):  # number of finished epochs over shards
        index, turn = divmod(done, PASSES)
        codes = load_shard_codes(work_folder, vq, index, shard_size)
        scenes = sample_scenes(shard_size, index + 10_000)
        rng = np.random.default_rng((index, turn))
        order = rng.permutation(shard_size)
        for i in range(0, shard_size - batch_size + 1, batch_size):
            chosen = order[i : i + batch_size]
            captions = np.stack([encode_caption(write_caption(scenes[j], rng)) for j in chosen])
            # One word in a hundred becomes `<unk>`, so that prompts with unknown words work; 0 is padding.
            captions[(rng.random(captions.shape) < 0.01) & (captions > 0)] = UNKNOWN
            yield (
                torch.from_numpy(captions),
                torch.from_numpy(codes[chosen].astype(np.int64)),
                done * shard_size + i + batch_size,
            )


def compute_token_losses(
    model: ScenesTarget, captions: Tensor, codes: Tensor, dropped_captions: Tensor | None = None
) -> Tensor:
    """Compute the negative log-likelihood of each code, in nats.

    Args:
        model: target.
        captions: word ids, int64 `[rows, 24]`.
        codes: image tokens, int64 `[rows, 256]`.
        dropped_captions: bool `[rows]`, true for rows without caption; None: all rows have captions.

    Returns:
        Losses `[rows, 256]`.
    """
    logits = model.logits(captions, codes, dropped_captions)
    return F.cross_entropy(logits.flatten(0, 1), codes.flatten(), reduction="none").view(codes.shape)


@torch.no_grad()
def evaluate_losses(model: ScenesTarget, captions: Tensor, codes: Tensor) -> dict[str, float]:
    """Compute mean losses in nats per token.

    Args:
        model: target.
        captions: word ids of scenes, int64 `[scenes, 24]`, with at least 32 scenes.
        codes: image tokens of the scenes, int64 `[scenes, 256]`.

    Returns:
        Means over all tokens, over grid rows 0-3 (`sky`), 5-12 (`middle`) and 14-15 (`ground`), and over 32 scenes
        without caption.
    """
    losses = torch.cat(
        [compute_token_losses(model, captions[i : i + 32], codes[i : i + 32]) for i in range(0, len(codes), 32)]
    )
    blank = torch.ones(32, dtype=torch.bool, device=codes.device)
    without = compute_token_losses(model, captions[:32], codes[:32], blank)
    rows = losses.view(-1, GRID, GRID).mean((0, 2))
    return {
        "all": losses.mean().item(),
        "sky": rows[:4].mean().item(),
        "middle": rows[5:13].mean().item(),
        "ground": rows[14:].mean().item(),
        "no caption": without.mean().item(),
    }


def train_target(
    work_folder: Path,
    minutes: float,
    cooldown: float = 0.3,
    batch: int = 16,
    lr: float = 0.02,
    compiled: bool = False,
    device: str = "cpu",
    target_config: DecoderConfig | None = None,
    shard_size: int = SHARD,
) -> None:
    """Train the target of a work folder, and write its averaged weights to `target.pt`.

    An interrupted call continues from `target-state.pt`. A call with more minutes continues from `target-stable.pt`,
    the last state before the learning rate fell, or from `target.pt` if there is none. The files are written every four
    minutes.

    Args:
        work_folder: folder of checkpoints and shards.
        minutes: minutes of training, including earlier calls.
        cooldown: share of the time, at its end, over which the learning rate falls to zero; before, it is constant.
        batch: number of scenes per step.
        lr: maximum learning rate of Muon.
        compiled: whether to use `torch.compile`. It needs a C++ compiler and gave 20 % more scenes per second.
        device: PyTorch device.
        target_config: sizes of the target; None: those of the target in the work folder, or else `CONFIG`. The number
            of codes is always that of the VQ tokenizer.
        shard_size: number of scenes in a shard; the same for all calls on a work folder.

    Raises:
        CheckpointError: the target in the work folder has other sizes than `target_config`.
    """
    torch.manual_seed(1)
    vq = load_vq(work_folder).to(device)
    ongoing, stable, finished = (work_folder / f"target{kind}.pt" for kind in ("-state", "-stable", ""))
    training_plan = {"minutes": minutes, "cooldown": cooldown}
    path, state = _find_resume_state((ongoing, stable, finished), training_plan)
    config = replace(target_config or CONFIG, vocab_size=vq.config.codes)
    if state is not None:
        stored_config = DecoderConfig(**state["config"])
        if target_config is not None and stored_config != config:
            raise CheckpointError(
                field=str(path),
                found=f"a target of size {format_size_name(stored_config)}",
                expected=format_size_name(target_config),
                remedy="give another --work, or leave --size out",
            )
        config = stored_config
    if state is not None and state.get("seconds", 0.0) >= 60 * minutes:
        print(f"target has had its {minutes:g} minutes")
        return
    model = ScenesTarget(vq.codebook.cpu(), config).to(device)
    matrices = [w for w in model.decoder.parameters() if w.ndim == 2]
    others = [w for w in model.parameters() if not any(w is m for m in matrices)]
    muon = Muon(matrices, lr)
    adam = torch.optim.AdamW(others, 2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    average = copy.deepcopy(model)
    num_seen = 0
    step = 0
    earlier_seconds = 0.0
    if state is not None:
        model.load_state_dict(state["model"])
        average.load_state_dict(state.get("average", state["model"]))
        num_seen = state["seen"]
        step = state.get("step", 0)
        earlier_seconds = state.get("seconds", 0.0)
        if "muon" in state:
            muon.load_state_dict(state["muon"])
            adam.load_state_dict(state["adam"])
    fresh_scenes = sample_scenes(256, FRESH_SEED)
    fresh = torch.from_numpy(tokenise_scenes(vq, 256, FRESH_SEED).astype(np.int64)).to(device)
    rng = np.random.default_rng(5)
    fresh_captions = torch.from_numpy(
        np.stack([encode_caption(write_caption(s, rng, complete=True)) for s in fresh_scenes])
    )
    fresh_captions = fresh_captions.to(device)
    row_weights = ROW_WEIGHT.repeat_interleave(GRID).to(device)

    def save() -> dict[str, float]:
        snapshot = {
            "model": model.state_dict(),
            "average": average.state_dict(),
            "muon": muon.state_dict(),
            "adam": adam.state_dict(),
            "seen": num_seen,
            "step": step,
            "seconds": watch.seconds(),
            "config": asdict(config),
            "plan": training_plan,
        }
        save_checkpoint(ongoing, snapshot)
        if progress < 1 - cooldown:  # training for more minutes must continue with the full learning rate
            save_checkpoint(stable, snapshot)
        with mixed_precision(device):
            scores = evaluate_losses(average, fresh_captions, fresh)
        weights = average.state_dict()
        save_checkpoint(finished, {"model": weights, "seen": num_seen, "config": asdict(config), "scores": scores})
        return scores

    compute_losses = torch.compile(compute_token_losses) if compiled else compute_token_losses
    watch = Stopwatch(device, earlier_seconds)
    last_save = last_print = earlier_seconds
    running_loss = torch.zeros((), device=device)
    for captions, codes, num_seen in iterate_batches(work_folder, vq, batch, num_seen, shard_size):  # noqa: B020
        progress = watch.seconds() / (60 * minutes)
        if progress >= 1:
            break
        rate = min(1.0, (step + 1) / 60, (1 - progress) / cooldown if cooldown else 1.0)
        muon.param_groups[0]["lr"] = lr * rate
        adam.param_groups[0]["lr"] = 2e-3 * rate
        # A tenth of the captions is dropped, so that the model also learns the distribution that guidance needs.
        dropped = torch.rand(len(codes), device=device) < 0.1
        with mixed_precision(device):
            losses = compute_losses(model, captions.to(device), codes.to(device), dropped)
        loss = (losses * row_weights).mean()
        update_weights(loss, muon, adam)
        update_average(average, model, min(0.995, (step + 1) / (step + 20)))
        running_loss.lerp_(losses.detach().mean(), max(0.02, 1 / (step + 1)))
        step += 1
        now = watch.seconds()
        if now - last_print > 60:
            last_print = now
            print(f"target {now:6.0f} s  seen {num_seen}  rate {rate:.2f}  running loss {running_loss:.3f}", flush=True)
        if now - last_save > 240:
            last_save = now
            print("  fresh scenes: " + "  ".join(f"{k} {v:.3f}" for k, v in save().items()), flush=True)
    print(f"target done: seen {num_seen}  " + "  ".join(f"{k} {v:.3f}" for k, v in save().items()))


def update_weights(loss: Tensor, muon: Muon, adam: torch.optim.AdamW) -> None:
    """Update the weights by one step of both optimisers; the gradients of Adam's weights are clipped to norm 1."""
    muon.zero_grad(set_to_none=True)
    adam.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(adam.param_groups[0]["params"], 1.0)
    muon.step()
    adam.step()


@torch.no_grad()
def update_average(average: ScenesTarget, model: ScenesTarget, decay: float) -> None:
    """Update the averaged weights in place: `average = decay * average + (1 - decay) * model`."""
    for averaged, current in zip(average.parameters(), model.parameters(), strict=True):
        averaged.lerp_(current, 1 - decay)


def _find_resume_state(
    checkpoint_paths: tuple[Path, Path, Path], training_plan: dict[str, float]
) -> tuple[Path, dict[str, Any] | None]:
    """Return the path and contents of the checkpoint from which training continues; None as contents: start anew.

    Args:
        checkpoint_paths: paths of the last state, of the last state before the learning rate fell, and of the averaged
            weights.
        training_plan: `minutes` and `cooldown`. The last state is used only if its plan is the same.
    """
    ongoing, stable, finished = checkpoint_paths
    if ongoing.exists():
        state = load_checkpoint(ongoing)
        if state["plan"] == training_plan or not stable.exists():
            return ongoing, state
    path = stable if stable.exists() else finished
    return path, load_checkpoint(path) if path.exists() else None


def load_target(work_folder: Path, name: str = "target.pt") -> ScenesTarget:
    """Load a trained target with its averaged weights from the file `name` of a work folder."""
    state = load_checkpoint(work_folder / name)
    model = ScenesTarget(state["model"]["code_embedding.features"][:, :CODE_DIM], DecoderConfig(**state["config"]))
    model.load_state_dict(state["model"])
    return model.eval()
