"""Fitting a drafter to its target: Muon and AdamW, averaged weights, and a state file to go on from.

Everything random is a function of the seed and the step, so that a fit that was interrupted and gone on with ends with
the weights of one that was not.
"""

from __future__ import annotations

import copy
import io
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...bundle.manifest import Manifest
from ...engines.contracts import Progress
from ...errors import CheckpointError, RequestError
from ...export.models.eagle import EagleDrafter
from ...output.files import write_output
from ...pipeline import Pipeline
from ...user_files import reading
from ..muon import Muon
from ..precision import mixed_precision
from .batches import Batch, Batches, chosen_pictures
from .borrowed import Borrowed
from .figures import Tally, default_trees
from .folder import card_of, check_folder, save_drafter
from .losses import Loss, draft_loss, guided, pooled
from .model import drafted, new_drafter
from .parallel import Workers
from .shards import Data

_EVERY = 60.0  # seconds between figures, and between saved states
_WARM_UP, _FALL = 40, 0.6  # steps over which the rates rise, and the share of all over which they fall
_ADAM = 1e-3  # rate of what is no matrix, where Muon's is 0.01
_FEW, _MOST = 16, 64  # pictures that figures are of, on the way and at the end


@dataclass(frozen=True)
class Options:
    """What decides the weights, besides data and target.

    steps: updates. batch: pictures of an update. loss: see `losses.py`; neighbors and lambda_ are of `tv-neighbors`.
    depths: of the training-time test. rate: Muon's. feature_weight: of the regression of hidden states. noise: added to
    these, as a share of their standard deviation. caption_dropout: share of pictures learned without caption.
    cfg_scale: guidance of the distributions; 1 learns from conditional rows alone.
    """

    steps: int
    batch: int = 12
    loss: Loss = "kl"
    depths: int = 3
    rate: float = 0.01
    feature_weight: float = 1.0
    noise: float = 0.1
    caption_dropout: float = 0.0
    cfg_scale: float = 1.0
    neighbors: int = 10
    lambda_: float = 2.0
    seed: int = 0


def state_path(output: Path) -> Path:
    """Where a fit that writes `output` keeps its state."""
    return output.with_name(f"{output.name}.training.pt")


class Fit:
    """One fit; `run` makes its steps and writes the drafter. Raises: CheckpointError, OutputError, RequestError."""

    def __init__(
        self,
        data: Data,
        borrowed: Borrowed,
        manifest: Manifest,
        options: Options,
        output: Path,
        *,
        pipeline: Pipeline | None = None,
        device: str = "cpu",
        force: bool = False,
        workers: Workers | None = None,
    ) -> None:
        check_folder(output, force)
        if options.loss == "tv-neighbors" and borrowed.neighbors is None:
            raise CheckpointError(f"loss: bundle {borrowed.name} has no neighbour table, which tv-neighbors needs")
        self.data, self.borrowed, self.options, self.output, self.force = data, borrowed, options, output, force
        self.device, self.workers = device, workers or Workers()
        if options.batch % self.workers.count:
            raise RequestError(f"batch: found {options.batch}, expected a multiple of the {self.workers.count} workers")
        sides = 1 if options.cfg_scale == 1 else 2
        self.batches = Batches(data, borrowed.code_offset, sides, device, pipeline)
        self.trees = default_trees(manifest)
        self.drafter, self.head = new_drafter(borrowed, options.seed).to(device), borrowed.head.to(device)
        near = borrowed.neighbors
        self.neighbors = None if near is None else near[:, : options.neighbors].to(device)
        own = {name: weight for name, weight in self.drafter.named_parameters() if weight.requires_grad}
        matrices = {
            name for name, weight in own.items() if weight.ndim == 2 and not ("norm" in name or "embed" in name)
        }
        others = [weight for name, weight in own.items() if name not in matrices]
        self.muon = Muon([own[name] for name in own if name in matrices], options.rate)
        self.adam = torch.optim.AdamW(others, _ADAM, betas=(0.9, 0.95), weight_decay=0.0)
        self.average, self.step = copy.deepcopy(self.drafter), 0
        self.average.head = self.drafter.head
        self.training = data.training
        self._restore()

    def run(self, progress: Progress, say: Callable[[str], None], every: float = _EVERY) -> dict[str, float]:
        """Make the steps that are left, and write the drafter of averaged weights; its figures.

        every: seconds between two figures, which are said, and between two saved states.
        """
        options, told = self.options, time.monotonic()
        if self.step:
            say(f"going on from step {self.step}, saved in {state_path(self.output)}")
        while self.step < options.steps:
            progress("training", self.step, options.steps)
            loss = self._update()
            if time.monotonic() - told >= every and self.step < options.steps and self.workers.first:
                say(f"step {self.step}, loss {float(loss):.3f}: {_line(self.figures(_FEW))}")
                self._save()
                told = time.monotonic()
        found: dict[str, float] = {}
        if self.workers.first:
            progress("training", self.step, options.steps)
            found = self.figures()
            self._save()
            pictures = len(self.training), min(len(self.data.validation), _MOST)
            given = {name.rstrip("_").replace("_", " "): value for name, value in asdict(options).items()}
            card = card_of(self.borrowed, self.average, found, pictures, given)
            save_drafter(self.average, self.output, self.borrowed.fields, card, self.force)
        self.workers.wait()
        return found

    @torch.no_grad()
    def figures(self, most: int = _MOST) -> dict[str, float]:
        """Of the averaged weights, on at most so many pictures that are not trained on."""
        tally = Tally(self.trees)
        generator = torch.Generator(self.device).manual_seed(self.options.seed)
        near = None if self.neighbors is None else (self.neighbors, self.options.lambda_)
        head, scale = self.head, self.options.cfg_scale
        for number in self.data.validation[:most]:
            batch = self.batches.batch([number])
            depths = min(tally.depths, batch.cells - 1)
            with mixed_precision(self.device):
                passes = list(drafted(self.average, batch.tokens, batch.states[:, :-1], depths))
            seen = (
                tuple(guided(own.float(), head, scale)[0] for own in (batch.wanted(d), batch.predicted(hidden, d)))
                for d, hidden in enumerate(passes)
            )
            tally.add(((wanted, logits) for wanted, logits in seen), near, generator)
        return tally.figures()

    def _update(self) -> Tensor:
        """One step; the loss."""
        options, workers = self.options, self.workers
        warm = min(1.0, (self.step + 1) / _WARM_UP, (1 - self.step / options.steps) / _FALL)
        self.muon.param_groups[0]["lr"], self.adam.param_groups[0]["lr"] = options.rate * warm, _ADAM * warm
        numbers = chosen_pictures(self.training, options.seed, self.step * options.batch, options.batch)
        numbers = numbers[workers.rank :: workers.count]
        seed = (options.seed * 1_000_003 + self.step) * 1024 + workers.rank
        generator = torch.Generator(self.device).manual_seed(seed)
        drop = torch.rand(len(numbers), generator=generator, device=self.device) < options.caption_dropout
        batch = self.batches.batch(numbers, frozenset(torch.nonzero(drop).flatten().tolist()))
        self.muon.zero_grad(set_to_none=True)
        self.adam.zero_grad(set_to_none=True)
        loss = self._loss(batch, generator)
        torch.autograd.backward(loss)
        weights = [*self.muon.param_groups[0]["params"], *self.adam.param_groups[0]["params"]]
        workers.average([weight.grad for weight in weights if weight.grad is not None])
        torch.nn.utils.clip_grad_norm_(self.adam.param_groups[0]["params"], 0.5)
        self.muon.step()
        self.adam.step()
        self.step += 1
        with torch.no_grad():
            for kept, current in zip(self.average.parameters(), self.drafter.parameters(), strict=True):
                kept.lerp_(current, 1 - min(0.99, (self.step + 1) / (self.step + 20)))
        return loss.detach()

    def _loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        options, head = self.options, self.head
        given = batch.states[:, :-1]
        spread = torch.rand(given.shape, generator=generator, device=self.device) - 0.5
        noisy = given + spread * options.noise * given.std()
        with torch.no_grad():
            goal = guided(batch.wanted(0), head, options.cfg_scale).softmax(-1)
            if options.loss == "tv-neighbors":
                assert self.neighbors is not None
                goal = pooled(goal, self.neighbors, options.lambda_)
        total = torch.zeros((), device=self.device)
        with mixed_precision(self.device):
            for depth, hidden in enumerate(drafted(self.drafter, batch.tokens, noisy, options.depths)):
                predicted = batch.predicted(hidden, depth)
                logits = guided(predicted, head, options.cfg_scale)
                near = F.smooth_l1_loss(predicted.float(), batch.wanted(depth))
                total = total + draft_loss(options.loss, goal[:, depth:], logits) + options.feature_weight * near
        return total / options.depths

    def _save(self) -> None:
        state: dict[str, Any] = {
            "options": json.dumps(self._identity()),
            "step": self.step,
            "model": _trained(self.drafter),
            "average": _trained(self.average),
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
            state = torch.load(path, map_location=self.device, weights_only=True)
            if json.loads(state["options"]) != self._identity():
                raise CheckpointError(
                    f"{path}: was saved with other options, another target or other data; give the same ones to go "
                    "on, or remove it to begin anew"
                )
            self.step = int(state["step"])
            for module, name in ((self.drafter, "model"), (self.average, "average")):
                module.load_state_dict({**module.state_dict(), **state[name]})
            self.muon.load_state_dict(state["muon"])
            self.adam.load_state_dict(state["adam"])

    def _identity(self) -> dict[str, Any]:
        """What must be the same to go on; more steps may be asked for."""
        own = {name: value for name, value in asdict(self.options).items() if name != "steps"}
        return {**own, "target": self.borrowed.weights, "pictures": len(self.data)}


def _trained(drafter: EagleDrafter) -> dict[str, Tensor]:
    return {name: weight for name, weight in drafter.state_dict().items() if not name.startswith("head.")}


def _line(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
