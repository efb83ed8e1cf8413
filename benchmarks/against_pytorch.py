"""Compare the seconds per image of a published PyTorch program and lantern-rt on one host.

    git clone https://github.com/FoundationVision/LlamaGen
    python benchmarks/against_pytorch.py --official LlamaGen                              # GPT-B, 256 pixels
    python benchmarks/against_pytorch.py --official LlamaGen --precision int8 --provider openvino-bf16
    python benchmarks/against_pytorch.py --shape GPT-XL --grid 32 --rounds 1              # lantern-rt only
    python benchmarks/against_pytorch.py --precision int8 --cfg-tokens 100% 50%           # guidance for half the image
    python benchmarks/against_pytorch.py --official LlamaGen --precision int8 --memory    # peak memory instead of time

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
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from published_program import GUIDANCE, PROGRAMS, ImageTiming, load_pytorch_generator
from random_bundle import SHAPES, random_bundle

from lantern_rt import LanternError, Pipeline
from lantern_rt.bundle.files import open_bundle
from lantern_rt.bundle.rewrite import write_draft_heads
from lantern_rt.compare.prompts import read_bundle_prompts
from lantern_rt.engines.host import describe_processor
from lantern_rt.runtime.heads import draft_head_shapes
from lantern_rt.train.drafter.heads import RANK, UNITS

METHODS = ("ar", "sjd:window=3", "sjd:window=7", "rows:window=8", "rows:window=6", "rows:window=5", "rows:window=4")
PROJECT_IMAGES = 8  # images of the bundle `--project` that give the tokens per pass
# Runs a command of lantern-rt, which imports no PyTorch, and prints the memory of the process.
LANTERN = """
import sys
from lantern_rt.cli.main import run_program
assert run_program(sys.argv[1:]) == 0
print(open("/proc/self/status").read())
"""


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


def print_peak_memory(label: str, arguments: Sequence[object]) -> None:
    """Run a Python program in a process of its own, and print the most memory that it had at once (Linux).

    The program prints /proc/self/status. The `ru_maxrss` of a child would include the memory of this process.
    """
    process = subprocess.run([sys.executable, *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=True)
    (kilobytes,) = re.findall(r"^VmHWM:\s+(\d+) kB$", process.stdout, re.MULTILINE)
    print(f"  {label:46} {int(kilobytes) * 1024 / 1e9:7.2f} GB", flush=True)


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
    parser.add_argument("--memory", action="store_true", help="print the peak memory of each program, not its time")
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

        options = {"compute": arguments.compute, "precision": precision, "vq_precision": vq}
        bundle = arguments.bundle or random_bundle(shape, Path(folder) / name, **options)
        if shape.family not in PROGRAMS and not arguments.bundle:
            add_random_draft_heads(bundle)
        methods = arguments.methods or (["groups"] if shape.family in PROGRAMS else METHODS)
        if arguments.memory:
            if arguments.official:
                sizes = [size, shape.family, shape.grid, shape.cells_per_pass, arguments.threads]
                program_file = Path(__file__).with_name("published_program.py")
                print_peak_memory("PyTorch eager", [program_file, arguments.official, *sizes])
            for method in methods:
                run = ["run", bundle, "--class-id", 1, "--cfg-scale", GUIDANCE, "--method", method, "--provider", "cpu"]
                run += ["--threads", arguments.threads, "--output", Path(folder) / f"{method}.png"]
                print_peak_memory(method, ["-c", LANTERN, *run])
            return

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
        if shape.family in PROGRAMS:
            llamagen_shape = replace(SHAPES[size], grid=shape.grid)
            llamagen_bundle = random_bundle(llamagen_shape, Path(folder) / "llamagen", **options)
            generators[f"ar of LlamaGen, {size}"] = make_lantern_generator(open_pipeline(llamagen_bundle), "ar", None)
        method_pipeline = open_pipeline(bundle)
        for method in methods:
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
