"""Fitting a drafter to its target: Muon and AdamW, averaged weights, and a state file to go on from.

Everything random is a function of the seed and the step, so that a fit that was interrupted and continued ends with the
weights of one that was not.
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
from ...inputs import format_error, format_value, open_plain_file, reading
from ...output.files import check_new_folder, write_output
from ..muon import Muon
from ..precision import mixed_precision
from .batches import Batch, make_batch, shuffled_pictures
from .folder import MARKER, save_drafter
from .losses import guided_logits, kl_loss, overlap
from .model import draft_states, new_drafter
from .shards import ShardFolder
from .target import Target

DEPTHS = 3  # how deep in a draft it learns to go on from its own predictions
_NOISE = 0.1  # added to hidden states, as a share of their standard deviation
_MUON_RATE, _ADAM_RATE = 0.01, 1e-3
_WARM_UP, _COOL_DOWN = 40, 0.6  # steps over which the rates rise, and the share of all over which they fall
_SECONDS = 60.0  # between figures, and between saved states
_FIGURES_ON_THE_WAY, _FIGURES_AT_THE_END = 16, 64  # held-out pictures that figures are of, at most


@dataclass(frozen=True)
class Options:
    """What decides the weights, besides data and target.

    Args:
        steps: updates.
        batch: pictures of an update.
        cfg_scale: guidance of the distributions; 1 learns from conditional rows alone.
        seed: of weights, order and noise.
    """

    steps: int
    batch: int = 12
    cfg_scale: float = 1.0
    seed: int = 0


def check_device(device: str) -> None:
    """Check that PyTorch can train there.

    Raises:
        RequestError: it cannot.
    """
    try:
        torch.zeros(1, device=device).item()  # not so on `meta`, which holds no numbers
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        problem = f"PyTorch {torch.__version__} cannot compute there ({format_error(error, 80)})"
        raise RequestError(problem, field="device", found=format_value(device), remedy="give cpu") from error


def state_path(output: Path) -> Path:
    """Where a fit that writes `output` keeps its state."""
    return output.with_name(f"{output.name}.training.pt")


class Fit:
    """One fit; `run` makes its steps and writes the drafter. A state beside the goal is continued.

    Args:
        data: folder of shards; all of them are read once and checked.
        target: what the drafter belongs to.
        options: what decides the weights.
        output: folder to write. One that is there is replaced only by the fit whose state lies beside it.
        device: where to train, as PyTorch names it.

    Raises:
        CheckpointError: data or state are damaged, or of another target or fit.
        OutputError: `output` is there already.
    """

    def __init__(self, data: Path, target: Target, options: Options, output: Path, device: str = "cpu") -> None:
        check_new_folder(output, state_path(output).exists(), MARKER)
        self.data = ShardFolder(data, target.source, len(target.embeddings))
        self.target = target
        self.options = options
        self.output = output
        self.device = device
        self.head = target.head.to(device)
        self.drafter = new_drafter(target, options.seed).to(device)
        self.average = copy.deepcopy(self.drafter)
        self.average.head = self.drafter.head
        self.training = self.data.training
        self.step = 0
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, weight in self.drafter.named_parameters():
            if weight.requires_grad:
                is_matrix = weight.ndim == 2 and not ("norm" in name or "embed" in name)
                (matrices if is_matrix else others).append(weight)
        self.muon = Muon(matrices, _MUON_RATE)
        self.adam = torch.optim.AdamW(others, _ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self._restore()

    def run(self, progress: Progress, say: Callable[[str], None], every: float = _SECONDS) -> dict[str, float]:
        """Make the steps that are left, and write the drafter of averaged weights.

        Args:
            progress: told the step.
            say: told the figures on the way.
            every: seconds between two figures, and between two saved states.

        Returns:
            The drafter's figures.

        Raises:
            CheckpointError: numbers are no longer finite.
        """
        steps = self.options.steps
        last = time.monotonic()
        if self.step:
            say(f"going on from step {self.step}, saved in {state_path(self.output)}")
        while self.step < steps:
            progress("training", self.step, steps)
            loss = self._update()
            _check_finite({"loss": loss}, self.step)
            if time.monotonic() - last >= every and self.step < steps:
                figures = self.figures(_FIGURES_ON_THE_WAY)
                say(f"step {self.step}, loss {loss:.3f}: {describe_figures(figures)}")
                self._save()
                last = time.monotonic()
        progress("training", self.step, steps)
        figures = self.figures()
        _check_finite(figures, self.step)
        self._save()
        training = {
            "lantern_rt": __version__,
            "target": self.target.name,
            "target_sha256": self.target.source.weights,
            "pictures": len(self.training),
            "options": asdict(self.options),
            "figures": figures,
        }
        save_drafter(self.average, self.output, {**self.target.fields, "training": training}, force=True)
        return figures

    @torch.no_grad()
    def figures(self, limit: int = _FIGURES_AT_THE_END) -> dict[str, float]:
        """Compare averaged weights with the target, on held-out pictures.

        Args:
            limit: pictures at most.

        Returns:
            `overlap`: mean of sum(min(p, q)), 0 .. 1, also `at depth 1`, `2` in a draft; `top-1`: share of codes whose
            likeliest the drafter names.
        """
        overlaps: list[list[Tensor]] = [[] for _ in range(DEPTHS)]
        hits: list[Tensor] = []
        for number in self.data.validation[:limit]:
            batch = self._batch([number])
            with mixed_precision(self.device):
                chain = list(draft_states(self.average, batch.tokens, batch.states[:, :-1], DEPTHS))
            for depth, hidden in enumerate(chain):
                logits = self._logits(batch.predictions(hidden, depth).float())
                goal = self._logits(batch.goals(depth))
                overlaps[depth].append(overlap(goal.softmax(-1), logits.softmax(-1)).flatten())
                if not depth:
                    hits.append((logits.argmax(-1) == goal.argmax(-1)).flatten())
        means = [float(torch.cat(values).mean()) for values in overlaps]
        deeper = {f"overlap at depth {depth}": means[depth] for depth in range(1, DEPTHS)}
        return {"overlap": means[0], "top-1": float(torch.cat(hits).float().mean()), **deeper}

    def _batch(self, numbers: list[int]) -> Batch:
        sides = 1 if self.options.cfg_scale == 1 else 2
        return make_batch(self.data, numbers, self.target.code_offset, sides, self.device)

    def _logits(self, hidden: Tensor) -> Tensor:
        return guided_logits(hidden, self.head, self.options.cfg_scale)

    def _update(self) -> float:
        options = self.options
        rate = min(1.0, (self.step + 1) / _WARM_UP, (1 - self.step / options.steps) / _COOL_DOWN)
        self.muon.param_groups[0]["lr"] = _MUON_RATE * rate
        self.adam.param_groups[0]["lr"] = _ADAM_RATE * rate
        numbers = shuffled_pictures(self.training, options.seed, self.step * options.batch, options.batch)
        generator = torch.Generator(self.device).manual_seed(options.seed * 1_000_003 + self.step)
        self.muon.zero_grad(set_to_none=True)
        self.adam.zero_grad(set_to_none=True)
        loss = self._loss(self._batch(numbers), generator)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.adam.param_groups[0]["params"], 0.5)
        self.muon.step()
        self.adam.step()
        self.step += 1
        decay = min(0.99, (self.step + 1) / (self.step + 20))
        with torch.no_grad():
            for mean, weight in zip(self.average.parameters(), self.drafter.parameters(), strict=True):
                mean.lerp_(weight, 1 - decay)
        return float(loss.detach())

    def _loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Divergence of distributions and distance of hidden states, the mean over depths."""
        states = batch.states[:, :-1]
        noise = torch.rand(states.shape, generator=generator, device=self.device) - 0.5
        noisy = states + noise * _NOISE * states.std()
        with torch.no_grad():
            p = self._logits(batch.goals(0)).softmax(-1)
        total = torch.zeros((), device=self.device)
        with mixed_precision(self.device):
            for depth, hidden in enumerate(draft_states(self.drafter, batch.tokens, noisy, DEPTHS)):
                predictions = batch.predictions(hidden, depth)
                distance = F.smooth_l1_loss(predictions.float(), batch.goals(depth))
                total = total + kl_loss(p[:, depth:], self._logits(predictions)) + distance
        return total / DEPTHS

    def _save(self) -> None:
        state: dict[str, Any] = {
            "options": json.dumps(self._identity()),
            "step": self.step,
            "model": _trained_weights(self.drafter),
            "average": _trained_weights(self.average),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_output(state_path(self.output), buffer.getvalue(), force=True)

    def _restore(self) -> None:
        path = state_path(self.output)
        if not path.exists():
            return
        with reading(path, "the state of a fit", CheckpointError, "remove it to begin anew"):
            with open_plain_file(path) as file:
                state = torch.load(file, map_location=self.device, weights_only=True)
            if json.loads(state["options"]) != self._identity():
                problem = "was saved with other options, another target or other data"
                raise CheckpointError(problem, field=str(path), remedy="give the same ones, or remove it")
            self.step = int(state["step"])
            for module, name in ((self.drafter, "model"), (self.average, "average")):
                module.load_state_dict({**module.state_dict(), **state[name]})
            self.muon.load_state_dict(state["muon"])
            self.adam.load_state_dict(state["adam"])

    def _identity(self) -> dict[str, Any]:
        """What must be the same to go on; the number of steps may grow."""
        options = asdict(self.options)
        del options["steps"]
        return {**options, "target": self.target.source.weights, "data": self.data.digest}


def describe_figures(figures: dict[str, float]) -> str:
    """Figures as one line."""
    return ", ".join(f"{name} {value:.3f}" for name, value in figures.items())


def _check_finite(figures: Mapping[str, float], step: int) -> None:
    for name, value in figures.items():
        if not math.isfinite(value):
            remedy = "draw other pictures"
            raise CheckpointError(field=f"{name} at step {step}", found=str(value), expected="finite", remedy=remedy)


def _trained_weights(drafter: EagleDrafter) -> dict[str, Tensor]:
    return {name: weight for name, weight in drafter.state_dict().items() if not name.startswith("head.")}
