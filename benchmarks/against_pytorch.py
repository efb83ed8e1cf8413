"""Compare the seconds per image of a published PyTorch program and lantern-rt on one host.

    git clone https://github.com/FoundationVision/LlamaGen
    python benchmarks/against_pytorch.py --official LlamaGen                              # GPT-B, 256 pixels
    python benchmarks/against_pytorch.py --official LlamaGen --precision int8 --provider openvino-bf16
    python benchmarks/against_pytorch.py --shape GPT-XL --grid 32 --rounds 1              # lantern-rt only
    python benchmarks/against_pytorch.py --precision int8 --cfg-tokens 100% 50%           # guidance for half the image

    git clone https://github.com/YuqingWang1029/PAR
    python benchmarks/against_pytorch.py --official PAR --shape PAR-4x-B                  # 384 pixels; or PAR-16x-B

    git clone https://github.com/ThisisBillhe/NAR                                         # needs tqdm
    python benchmarks/against_pytorch.py --official NAR/NAR-images --shape NAR-B          # 512 pixels

    python benchmarks/against_pytorch.py --official LlamaGen --device cuda --compute float16

The models are class-conditional and have random weights of the published sizes, or the weights of `--bundle`. Guidance
is 4, sampling uses the full vocabulary, and the default type is float32. `--compile` also measures the program compiled
by `torch.compile`.

The acceptance rate with random weights is meaningless. The time of a forward pass is therefore measured, including
random draft heads, and the number of passes is computed from the tokens per pass with the bundle `--project`. These
methods are marked *replayed*. The number of passes of `ar`, `rows` and `groups` does not depend on the weights.

Models of PAR and NAR are compared with `ar` of LlamaGen in the same size. The program prints medians over the rounds:
seconds, and the ratio to the first line. It needs `lantern-rt[export]`. There is no pass or fail.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from random_bundle import SHAPES, ModelShape, random_bundle

from lantern_rt import LanternError, Pipeline
from lantern_rt.bundle.files import open_bundle
from lantern_rt.bundle.rewrite import write_draft_heads
from lantern_rt.compare.prompts import read_bundle_prompts
from lantern_rt.engines.host import describe_processor
from lantern_rt.runtime.heads import draft_head_shapes
from lantern_rt.train.drafter.heads import RANK, UNITS

METHODS = ("ar", "sjd:window=3", "sjd:window=7", "rows:window=8", "rows:window=6", "rows:window=5", "rows:window=4")
GUIDANCE = 4.0
# Model families of the published programs, by a model argument that only this program has.
PROGRAMS = {"par": "ar_token_num", "nar": "medusa_attention_num"}
PROJECT_IMAGES = 8  # images of the bundle `--project` that give the tokens per pass


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


def make_lantern_generator(
    pipeline: Pipeline, method: str, assumed_tokens_per_pass: float | None, cfg_tokens: str = "100%"
) -> Callable[[], ImageTiming]:
    """Return a function that generates an image; given tokens per pass, the time of the codes is computed from them."""
    request = read_bundle_prompts(pipeline.bundle, count=1).request(0, 1)
    guidance = {"cfg_scale": GUIDANCE, "cfg_tokens": cfg_tokens}

    def generate_image() -> ImageTiming:
        start_time = time.perf_counter()
        statistics = pipeline(**request, method=method, **guidance).stats
        other_seconds = time.perf_counter() - start_time - statistics.seconds
        factor = statistics.tokens_per_forward_pass / assumed_tokens_per_pass if assumed_tokens_per_pass else 1.0
        return ImageTiming(statistics.seconds * factor, other_seconds, round(statistics.target_passes * factor))

    return generate_image


def add_random_draft_heads(bundle: Path) -> None:
    """Add random draft heads to a bundle, in the sizes of trained heads, so that a draft costs the same time."""
    opened = open_bundle(bundle)
    rng = np.random.default_rng(0)
    shapes = draft_head_shapes(opened.manifest.codebook_size, opened.manifest.target.hidden_size, RANK, UNITS)
    write_draft_heads(opened, {name: rng.normal(0, 0.02, shape).astype(np.float16) for name, shape in shapes.items()})


def measure_tokens_per_pass(bundle_name: str, method: str) -> float | None:
    """Return the tokens per forward pass of a method with a bundle.

    The result is None for methods whose number of passes does not depend on the sampled codes.
    """
    if method.startswith(("ar", "rows", "groups")):
        return None
    with Pipeline.from_bundle(bundle_name) as pipeline:
        request = read_bundle_prompts(pipeline.bundle).request(0, PROJECT_IMAGES)
        return pipeline(**request, method=method).stats.tokens_per_forward_pass


def time_images_in_turns(
    generators: dict[str, Callable[[], ImageTiming]], num_rounds: int
) -> dict[str, list[ImageTiming]]:
    """Generate one image per round with each generator; each round starts with another generator.

    Returns:
        The times of each generator's images, in the order of the rounds.
    """
    labels = [*generators]
    timings_by_label = {label: [] for label in generators}
    for round_index in range(num_rounds):
        first = round_index % len(labels)
        for label in labels[first:] + labels[:first]:
            timings_by_label[label].append(generators[label]())
    return timings_by_label


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--official", type=Path, metavar="FOLDER", help="a clone of LlamaGen's, PAR's or NAR's code")
    parser.add_argument("--compile", action="store_true", help="also time the published program with torch.compile")
    parser.add_argument("--shape", choices=[*SHAPES], default="GPT-B", help="published sizes, random weights")
    parser.add_argument("--grid", type=int, help="rows of the square grid: 16 for 256 pixels, 32 for 512")
    parser.add_argument("--precision", help="precision of the random weights; int8 applies to the image decoder, too")
    parser.add_argument("--bundle", type=Path, help="a class-conditional LlamaGen bundle instead of random weights")
    parser.add_argument("--methods", nargs="+", help="decoding methods; models of PAR and NAR have only `groups`")
    parser.add_argument("--cfg-tokens", nargs="+", default=["100%"], help="shares of the codes with guidance")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of both programs")
    parser.add_argument("--compute", choices=("float32", "float16"), default="float32", help="type of both targets")
    parser.add_argument("--provider", help="provider of the image decoder, such as openvino-bf16 [default: --device]")
    parser.add_argument("--project", default="scenes", help="bundle whose tokens per forward pass are used")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    name = arguments.shape
    shape = replace(SHAPES[name], grid=arguments.grid or SHAPES[name].grid)
    size = f"GPT-{name.split('-')[-1]}"
    program = "LlamaGen" if name == size else name
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        precision = arguments.precision
        vq = "int8" if arguments.precision == "int8" else "fp32"

        def open_pipeline(bundle: Path) -> Pipeline:
            providers = [arguments.device, f"vq_decoder={arguments.provider or arguments.device}"]
            opened = stack.enter_context(Pipeline.from_bundle(bundle, arguments.threads, provider=providers))
            opened.warm_up()
            return opened

        generators: dict[str, Callable[[], ImageTiming]] = {}
        if arguments.official:
            placement = {"device": arguments.device, "compute": arguments.compute}
            generators[f"{program}, PyTorch eager"] = load_pytorch_generator(
                arguments.official, size, shape, **placement
            )
            if arguments.compile:
                generators[f"{program}, torch.compile"] = load_pytorch_generator(
                    arguments.official, size, shape, compiled=True, **placement
                )
        options = {"compute": arguments.compute, "precision": precision, "vq_precision": vq}
        bundle = arguments.bundle or random_bundle(shape, Path(folder) / name, **options)
        if shape.family in PROGRAMS:
            llamagen_shape = replace(SHAPES[size], grid=shape.grid)
            llamagen_bundle = random_bundle(llamagen_shape, Path(folder) / "llamagen", **options)
            generators[f"ar of LlamaGen, {size}"] = make_lantern_generator(open_pipeline(llamagen_bundle), "ar", None)
        elif not arguments.bundle:
            add_random_draft_heads(bundle)
        method_pipeline = open_pipeline(bundle)
        for method in arguments.methods or (["groups"] if shape.family in PROGRAMS else METHODS):
            tokens_per_pass = measure_tokens_per_pass(arguments.project, method)
            label = f"{method} (replayed: {tokens_per_pass:.2f} tokens a pass)" if tokens_per_pass else method
            for share in arguments.cfg_tokens:
                suffix = "" if share == "100%" else f", guidance {share}"
                generators[label + suffix] = make_lantern_generator(method_pipeline, method, tokens_per_pass, share)
        timings_by_label = time_images_in_turns(generators, arguments.rounds)
    baseline = next(iter(timings_by_label.values()))
    print(f"{describe_processor()}; threads: {arguments.threads}; {name}, {16 * shape.grid} pixels")
    print(f"  {'':46} seconds  tokens    rest   ratio  passes")
    for label, timings in timings_by_label.items():
        medians = [
            statistics.median(getattr(timing, name) for timing in timings)
            for name in ("seconds", "token_seconds", "other_seconds")
        ]
        ratios = (base.seconds / timing.seconds for base, timing in zip(baseline, timings, strict=True))
        ratio = statistics.median(ratios)
        num_passes = timings[0].num_passes or "-"
        print(f"  {label:46} {medians[0]:7.2f} {medians[1]:7.2f} {medians[2]:7.2f} {ratio:7.2f} {num_passes:>7}")


if __name__ == "__main__":
    try:
        main()
    except LanternError as error:
        sys.exit(f"against_pytorch.py: {error}")
