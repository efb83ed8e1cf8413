"""The published PyTorch programs of LlamaGen, PAR and NAR, imported from a clone, without anything of lantern-rt.

`python benchmarks/published_program.py CLONE MODEL FAMILY GRID CELLS_PER_PASS THREADS` generates an image, and prints
/proc/self/status, which has the peak memory.
"""

from __future__ import annotations

import importlib
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from random_bundle import ModelShape

GUIDANCE = 4.0
# Model families of the published programs, by a model argument that only this program has.
PROGRAMS = {"par": "ar_token_num", "nar": "medusa_attention_num"}


@dataclass(frozen=True)
class ImageTiming:
    """Time to generate one image.

    Attributes:
        token_seconds: seconds to sample all codes.
        other_seconds: seconds of the rest, mostly of decoding the codes to pixels.
        num_passes: forward passes of the target; None for published programs, which do not count them.
    """

    token_seconds: float
    other_seconds: float
    num_passes: int | None = None

    @property
    def seconds(self) -> float:
        return self.token_seconds + self.other_seconds


def load_pytorch_generator(
    clone_folder: Path,
    model_name: str,
    shape: ModelShape,
    compiled: bool = False,
    device: str = "cpu",
    compute: str = "float32",
) -> Callable[[], ImageTiming]:
    """Return a function that generates an image with the published code and random weights."""
    sys.path.insert(0, str(clone_folder))
    gpt = importlib.import_module("autoregressive.models.gpt")
    family = next((family for family, name in PROGRAMS.items() if hasattr(gpt.ModelArgs, name)), "llamagen")
    if family != shape.family:
        sys.exit(
            f"{clone_folder} is the program of {family}, but the shape is of {shape.family}: choose another --shape"
        )
    generate = importlib.import_module("autoregressive.models.generate").generate
    vq = importlib.import_module("tokenizer.tokenizer_image.vq_model").VQ_models["VQ-16"]().eval().to(device)
    groups = (
        {"ar_token_num": shape.cells_per_pass, "spe_token_num": shape.cells_per_pass - 1}
        if shape.family == "par"
        else {}
    )
    model = gpt.GPT_models[model_name](block_size=shape.grid**2, **groups).eval().to(device, getattr(torch, compute))
    model = torch.compile(model, fullgraph=True) if compiled else model
    options = {"cfg_scale": GUIDANCE, "top_k": 0, "temperature": 1.0, **groups}

    @torch.no_grad()
    def generate_image() -> ImageTiming:
        start_time = time.perf_counter()
        codes = generate(model, torch.tensor([1], device=device), shape.grid**2, **options)
        codes.cpu()  # waits for the device
        codes_time = time.perf_counter()
        vq.decode_code(codes, [1, vq.config.codebook_embed_dim, shape.grid, shape.grid]).cpu()
        return ImageTiming(codes_time - start_time, time.perf_counter() - codes_time)

    return generate_image


if __name__ == "__main__":
    clone, model, family, *numbers = sys.argv[1:]
    grid, cells_per_pass, threads = map(int, numbers)
    torch.set_num_threads(threads)
    load_pytorch_generator(Path(clone), model, Namespace(family=family, grid=grid, cells_per_pass=cells_per_pass))()
    print(Path("/proc/self/status").read_text())
