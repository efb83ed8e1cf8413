"""An image with its picture: LlamaGen's own code in PyTorch eager against lantern-rt, in turns on one host.

    git clone https://github.com/FoundationVision/LlamaGen
    python benchmarks/against_pytorch.py --official LlamaGen                              # GPT-B, 256 pixels
    python benchmarks/against_pytorch.py --official LlamaGen --precision int8 --provider openvino-bf16
    python benchmarks/against_pytorch.py --shape GPT-XL --grid 32 --rounds 1              # against our own `ar` alone
    python benchmarks/against_pytorch.py --precision int8 --cfg-tokens 100% 50%           # guidance for half the image

Random weights of the published sizes (`--bundle`: weights of one's own), class-conditional, guidance 4, the full
vocabulary, float32; `--compile` has it compiled by `torch.compile` as well, in the first round. How often drafts are
accepted with random weights says nothing, so a method that guesses is given the tokens a forward pass that it has with
the bundle `--project` (*replayed*); what a pass costs is measured, random heads included.
Row-parallel decoding takes as many passes whatever the weights are. Prints seconds and ratios to the first line,
medians over rounds. Needs `lantern-rt[export]`; nothing is judged.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from random_bundle import SHAPES, random_bundle

from lantern_rt import LanternError, Pipeline
from lantern_rt.bundle.files import open_bundle
from lantern_rt.bundle.rewrite import write_heads
from lantern_rt.compare.prompts import read_bundle_prompts
from lantern_rt.engines.host import processor
from lantern_rt.runtime.heads import head_shapes
from lantern_rt.train.drafter.heads import RANK, UNITS

METHODS = ("ar", "sjd:window=3", "sjd:window=7", "rows:window=8", "rows:window=6", "rows:window=5", "rows:window=4")
GUIDANCE, EAGER, COMPILED = 4.0, "LlamaGen, PyTorch eager", "LlamaGen, torch.compile"
PROJECTED = 8  # images of the bundle `--project` that tokens a pass are counted in


@dataclass(frozen=True)
class Image:
    """Seconds of one image: of its tokens, and of everything else, the picture above all."""

    tokens: float
    rest: float

    @property
    def seconds(self) -> float:
        return self.tokens + self.rest


def official(clone: Path, shape: str, grid: int, compiled: bool = False) -> Callable[[], Image]:
    """Draws an image with the published code and random weights; compiled: its target, as its own scripts do."""
    sys.path.insert(0, str(clone))
    gpt = importlib.import_module("autoregressive.models.gpt").GPT_models[shape]
    generate = importlib.import_module("autoregressive.models.generate").generate
    vq = importlib.import_module("tokenizer.tokenizer_image.vq_model").VQ_models["VQ-16"]().eval()
    model = gpt(block_size=grid * grid).eval()
    model = torch.compile(model, fullgraph=True) if compiled else model

    @torch.no_grad()
    def draw() -> Image:
        begun = time.perf_counter()
        codes = generate(model, torch.tensor([1]), grid * grid, cfg_scale=GUIDANCE, top_k=0, temperature=1.0)
        drawn = time.perf_counter()
        vq.decode_code(codes, [1, vq.config.codebook_embed_dim, grid, grid])
        return Image(drawn - begun, time.perf_counter() - drawn)

    return draw


def ours(pipeline: Pipeline, method: str, replayed: float | None, cfg_tokens: str | None) -> Callable[[], Image]:
    """Draws an image with this bundle; replayed: tokens a forward pass that it is given, None: those that it has."""
    request = read_bundle_prompts(pipeline.bundle, count=1).request(0, 1)
    guidance = {"cfg_scale": GUIDANCE, "cfg_tokens": cfg_tokens}

    def draw() -> Image:
        begun = time.perf_counter()
        found = pipeline(**request, method=method, **guidance).stats
        rest = time.perf_counter() - begun - found.seconds
        return Image(found.seconds * (found.tokens_per_forward_pass / replayed if replayed else 1.0), rest)

    return draw


def add_heads(bundle: Path) -> None:
    """Random heads of the sizes that training gives them: drafts cost what they cost with those."""
    opened, rng = open_bundle(bundle), np.random.default_rng(0)
    shapes = head_shapes(opened.manifest.codebook_size, opened.manifest.target.hidden_size, RANK, UNITS)
    write_heads(opened, {name: rng.normal(0, 0.02, shape).astype(np.float16) for name, shape in shapes.items()})


def tokens_a_pass(project: str, method: str) -> float | None:
    """Those of a method with this bundle; None for one whose passes do not depend on what is drawn."""
    if method.startswith(("ar", "rows")):
        return None
    with Pipeline.from_bundle(project) as pipeline:
        request = read_bundle_prompts(pipeline.bundle).request(0, PROJECTED)
        return pipeline(**request, method=method).stats.tokens_per_forward_pass


def take_turns(draws: dict[str, Callable[[], Image]], rounds: int) -> dict[str, list[Image]]:
    """Rounds of one image each, every round beginning with another."""
    names, found = [*draws], {name: [] for name in draws}
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(draws[name]())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--official", type=Path, metavar="FOLDER", help="a clone of LlamaGen's code")
    parser.add_argument("--compile", action="store_true", help="a line for that code with torch.compile, too")
    parser.add_argument("--shape", choices=[*SHAPES], default="GPT-B", help="published sizes, random weights")
    parser.add_argument("--grid", type=int, default=16, help="tokens a side: 16 for 256 pixels, 32 for 512")
    parser.add_argument("--precision", help="of the random weights; int8: of the image decoder, too")
    parser.add_argument("--bundle", type=Path, help="a class-conditional LlamaGen bundle instead of random weights")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--cfg-tokens", nargs="+", default=["100%"], help="shares of the image with guidance")
    parser.add_argument("--provider", default="cpu", help="of the image decoder, such as openvino-bf16")
    parser.add_argument("--project", default="scenes", help="bundle whose tokens a forward pass are replayed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        shape = replace(SHAPES[arguments.shape], grid=arguments.grid)
        made, vq = Path(folder) / arguments.shape, "int8" if arguments.precision == "int8" else "fp32"
        bundle = arguments.bundle or random_bundle(shape, made, precision=arguments.precision, vq_precision=vq)
        providers = ["cpu", f"vq_decoder={arguments.provider}"]
        if not arguments.bundle:
            add_heads(bundle)
        make = partial(official, arguments.official, arguments.shape, arguments.grid)
        draws = {EAGER: make()} if arguments.official else {}
        draws |= {COMPILED: make(compiled=True)} if arguments.official and arguments.compile else {}
        with Pipeline.from_bundle(bundle, arguments.threads, provider=providers) as pipeline:
            pipeline.warm_up()
            for method in arguments.methods:
                replayed = tokens_a_pass(arguments.project, method)
                name = f"{method} (replayed: {replayed:.2f} tokens a pass)" if replayed else method
                for share in arguments.cfg_tokens:
                    part = "" if share == "100%" else f", guidance {share}"
                    draws[name + part] = ours(pipeline, method, replayed, share)
            found = take_turns(draws, arguments.rounds)
    first = next(iter(found.values()))
    print(f"{processor()}; threads: {arguments.threads}; {arguments.shape}, {16 * arguments.grid} pixels")
    print(f"  {'':46} seconds  tokens    rest   ratio")
    for name, images in found.items():
        middle = [statistics.median(getattr(one, part) for one in images) for part in ("seconds", "tokens", "rest")]
        ratio = statistics.median(base.seconds / one.seconds for base, one in zip(first, images, strict=True))
        print(f"  {name:46} {middle[0]:7.2f} {middle[1]:7.2f} {middle[2]:7.2f} {ratio:7.2f}")


if __name__ == "__main__":
    try:
        main()
    except LanternError as error:
        sys.exit(f"against_pytorch.py: {error}")
