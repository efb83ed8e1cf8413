"""Data parallel training: what `torchrun` starts, each worker with its share of every batch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from ...checks import brief, short
from ...errors import RequestError


@dataclass(frozen=True)
class Workers:
    """This worker's number, and how many there are."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this one writes files and says what is going on."""
        return self.rank == 0

    def average(self, gradients: Sequence[Tensor]) -> None:
        """Replace gradients by their means over all workers."""
        if self.count > 1:
            for gradient in gradients:
                dist.all_reduce(gradient)
                gradient /= self.count

    def wait(self) -> None:
        """Until all workers have come here."""
        if self.count > 1:
            dist.barrier()


def check_device(device: str) -> None:
    """Raises: RequestError: PyTorch does not know it, or does not see it."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        found = f"device: found {short(device)}, which PyTorch {torch.__version__} does not see ({brief(error, 80)})"
        raise RequestError(f"{found}; give cpu") from error


@contextmanager
def joined_workers(device: str) -> Iterator[tuple[Workers, str]]:
    """The workers that `torchrun` started, or this process alone; and the device of this one."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield Workers(), device
        return
    rank, count, own = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if device == "cuda":
        device = f"cuda:{own}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield Workers(rank, count), device
    finally:
        dist.destroy_process_group()
