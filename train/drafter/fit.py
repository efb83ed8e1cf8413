"""Training of a drafter with Muon, AdamW and averaged weights. A state file allows training to continue later.

All random numbers depend on the seed and the step only, so an interrupted and continued run ends with the same weights
as an uninterrupted run.
"""

from __future__ import annotations

import copy
import io
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import __version__
from ...engines.contracts import Progress
from ...errors import CheckpointError, RequestError
from ...export.models.eagle import EagleDrafter
from ...inputs import convert_read_errors, format_error, format_value, open_regular_file
from ...output.files import check_new_folder, write_output
from ..muon import Muon
from ..precision import mixed_precision
from .batches import TrainingBatch, make_training_batch, select_shuffled_images
from .folder import MARKER, save_drafter
from .losses import compute_guided_logits, compute_kl_loss, compute_probability_overlap
from .model import make_drafter, predict_draft_states
from .shards import ShardFolder
from .target import TrainingTarget

DEPTHS = 3  # number of draft depths that are trained; at depths 1 and 2 the drafter reads its previous predictions
_NOISE = 0.1  # amplitude of noise on hidden states, as a share of their standard deviation
_MUON_RATE = 0.01
_ADAM_RATE = 1e-3
_WARM_UP = 40  # steps with rising learning rates
_COOL_DOWN = 0.6  # share of the steps with falling learning rates
_REPORT_SECONDS = 60.0  # time between two reports, and between two saved states
_REPORT_IMAGES = 16  # maximum number of validation images for a report
_FINAL_IMAGES = 64  # maximum number of validation images for the final figures


@dataclass(frozen=True)
class TrainingOptions:
    """Options that determine the weights, together with data and target."""

    steps: int  # number of updates
    batch: int = 12  # number of images per update
    cfg_scale: float = 1.0  # guidance scale of the distributions; 1 uses conditional rows only
    seed: int = 0  # seed of the weights, the sequence of images and the noise


def check_device(device: str) -> None:
    try:
        torch.zeros(1, device=device).item()  # fails on `meta`, whose tensors have no values
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        problem = f"PyTorch {torch.__version__} cannot compute on this device ({format_error(error, 80)})"
        raise RequestError(problem, field="device", found=format_value(device), remedy="give cpu") from error


def get_training_state_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.training.pt")


class DrafterTrainer:
    """Training run of a drafter; the method `run` trains the drafter and writes it to a folder.

    If the output folder has a state file beside it, training continues from this state.

    Raises:
        CheckpointError: the data or the state file are damaged, or belong to another target or run.
        OutputError: `output` exists without a state file.
    """

    def __init__(
        self, data: Path, target: TrainingTarget, options: TrainingOptions, output: Path, device: str = "cpu"
    ) -> None:
        check_new_folder(output, get_training_state_path(output).exists(), MARKER)
        self.data = ShardFolder(data, [target.shard_source], len(target.embeddings))
        self.target = target
        self.options = options
        self.output = output
        self.device = device
        self.head = target.head.to(device)
        self.drafter = make_drafter(target, options.seed).to(device)
        self.average = copy.deepcopy(self.drafter)
        self.average.head = self.drafter.head  # frozen, so one copy suffices
        self.training_indices = self.data.training_indices
        self.step = 0
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, weight in self.drafter.named_parameters():
            if weight.requires_grad:
                is_matrix = weight.ndim == 2 and not ("norm" in name or "embed" in name)
                (matrices if is_matrix else others).append(weight)
        self.muon = Muon(matrices, _MUON_RATE)
        self.adam = torch.optim.AdamW(others, _ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self._restore_state()

    def run(
        self, progress: Progress, print_line: Callable[[str], None], report_seconds: float = _REPORT_SECONDS
    ) -> dict[str, float]:
        """Run the remaining steps, write a drafter with the averaged weights, and return its metrics."""
        steps = self.options.steps
        last = time.monotonic()
        if self.step:
            print_line(f"continuing from step {self.step}, saved in {get_training_state_path(self.output)}")
        while self.step < steps:
            progress("training", self.step, steps)
            loss = self._update_weights()
            _check_finite({"loss": loss}, self.step)
            if time.monotonic() - last >= report_seconds and self.step < steps:
                metrics = self.compute_validation_metrics(_REPORT_IMAGES)
                print_line(f"step {self.step}, loss {loss:.3f}: {format_metrics(metrics)}")
                self._save_state()
                last = time.monotonic()
        progress("training", self.step, steps)
        metrics = self.compute_validation_metrics()
        _check_finite(metrics, self.step)
        self._save_state()
        training = {
            "lantern_rt": __version__,
            "target": self.target.name,
            "target_sha256": self.target.shard_source.weights,
            "pictures": len(self.training_indices),
            "options": asdict(self.options),
            "figures": metrics,
        }
        save_drafter(self.average, self.output, {**self.target.config_fields, "training": training}, force=True)
        return metrics

    @torch.no_grad()
    def compute_validation_metrics(self, max_images: int = _FINAL_IMAGES) -> dict[str, float]:
        """Compare the distributions of the drafter (with averaged weights) and of the target, on validation images.

        `overlap` and `overlap at depth d` are means of sum(min(p, q)), 0 .. 1. `top-1` is the share of cells where both
        have the same most probable token.
        """
        overlaps: list[list[Tensor]] = [[] for _ in range(DEPTHS)]
        hits: list[Tensor] = []
        for index in self.data.validation_indices[:max_images]:
            batch = self._make_batch([index])
            with mixed_precision(self.device):
                chain = list(predict_draft_states(self.average, batch.tokens, batch.states[:, :-1], DEPTHS))
            for depth, hidden in enumerate(chain):
                logits = self._compute_logits(batch.select_predictions(hidden, depth).float())
                target_logits = self._compute_logits(batch.select_target_states(depth))
                overlaps[depth].append(
                    compute_probability_overlap(target_logits.softmax(-1), logits.softmax(-1)).flatten()
                )
                if not depth:
                    hits.append((logits.argmax(-1) == target_logits.argmax(-1)).flatten())
        means = [float(torch.cat(values).mean()) for values in overlaps]
        deeper = {f"overlap at depth {depth}": means[depth] for depth in range(1, DEPTHS)}
        return {"overlap": means[0], "top-1": float(torch.cat(hits).float().mean()), **deeper}

    def _make_batch(self, indices: list[int]) -> TrainingBatch:
        rows_per_image = 1 if self.options.cfg_scale == 1 else 2
        return make_training_batch(self.data, indices, self.target.code_offset, rows_per_image, self.device)

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        return compute_guided_logits(hidden, self.head, self.options.cfg_scale)

    def _update_weights(self) -> float:
        options = self.options
        rate = min(1.0, (self.step + 1) / _WARM_UP, (1 - self.step / options.steps) / _COOL_DOWN)
        self.muon.param_groups[0]["lr"] = _MUON_RATE * rate
        self.adam.param_groups[0]["lr"] = _ADAM_RATE * rate
        indices = select_shuffled_images(self.training_indices, options.seed, self.step * options.batch, options.batch)
        # Each step has a new generator, so that a continued run has the same noise as an uninterrupted run.
        generator = torch.Generator(self.device).manual_seed(options.seed * 1_000_003 + self.step)
        self.muon.zero_grad(set_to_none=True)
        self.adam.zero_grad(set_to_none=True)
        loss = self._compute_loss(self._make_batch(indices), generator)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.adam.param_groups[0]["params"], 0.5)
        self.muon.step()
        self.adam.step()
        self.step += 1
        # Early averages forget faster, because the first weights are far from the trained weights.
        decay = min(0.99, (self.step + 1) / (self.step + 20))
        with torch.no_grad():
            for mean, weight in zip(self.average.parameters(), self.drafter.parameters(), strict=True):
                mean.lerp_(weight, 1 - decay)
        return float(loss.detach())

    def _compute_loss(self, batch: TrainingBatch, generator: torch.Generator) -> Tensor:
        states = batch.states[:, :-1]
        # In decoding the drafter reads inexact predictions of states; noise prepares it for them.
        noise = torch.rand(states.shape, generator=generator, device=self.device) - 0.5
        noisy = states + noise * _NOISE * states.std()
        with torch.no_grad():
            p = self._compute_logits(batch.select_target_states(0)).softmax(-1)
        total = torch.zeros((), device=self.device)
        with mixed_precision(self.device):
            for depth, hidden in enumerate(predict_draft_states(self.drafter, batch.tokens, noisy, DEPTHS)):
                predictions = batch.select_predictions(hidden, depth)
                distance = F.smooth_l1_loss(predictions.float(), batch.select_target_states(depth))
                total = total + compute_kl_loss(p[:, depth:], self._compute_logits(predictions)) + distance
        return total / DEPTHS

    def _save_state(self) -> None:
        state: dict[str, Any] = {
            "options": json.dumps(self._describe_run()),
            "step": self.step,
            "model": _select_trained_weights(self.drafter),
            "average": _select_trained_weights(self.average),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_output(get_training_state_path(self.output), buffer.getvalue(), force=True)

    def _restore_state(self) -> None:
        path = get_training_state_path(self.output)
        if not path.exists():
            return
        with convert_read_errors(path, "a training state", CheckpointError, "delete it to start again"):
            with open_regular_file(path) as file:
                state = torch.load(file, map_location=self.device, weights_only=True)
            if json.loads(state["options"]) != self._describe_run():
                problem = "was saved with other options, another target or other data"
                raise CheckpointError(
                    problem, field=str(path), remedy="give the same options and data, or delete the file"
                )
            self.step = int(state["step"])
            for module, name in ((self.drafter, "model"), (self.average, "average")):
                module.load_state_dict({**module.state_dict(), **state[name]})
            self.muon.load_state_dict(state["muon"])
            self.adam.load_state_dict(state["adam"])

    def _describe_run(self) -> dict[str, Any]:
        """Return the options (without `steps`), target and data, which must stay the same in a continued run."""
        options = asdict(self.options)
        del options["steps"]
        return {**options, "target": self.target.shard_source.weights, "data": self.data.digest}


def format_metrics(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())


def _check_finite(metrics: Mapping[str, float], step: int) -> None:
    for name, value in metrics.items():
        if not math.isfinite(value):
            remedy = "generate other training images"
            raise CheckpointError(field=f"{name} at step {step}", found=str(value), expected="finite", remedy=remedy)


def _select_trained_weights(drafter: EagleDrafter) -> dict[str, Tensor]:
    return {name: weight for name, weight in drafter.state_dict().items() if not name.startswith("head.")}
