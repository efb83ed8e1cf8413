"""Train a scenes target and its drafter here, export them, and measure every method against plain decoding.

    python benchmarks/end_to_end.py                     # LlamaGen-B's size on a GPU: about a quarter of an hour
    python benchmarks/end_to_end.py --batch 16          # where its memory is small
    python benchmarks/end_to_end.py --device cpu --size default --minutes 60 --drafter-minutes 20
    python benchmarks/end_to_end.py --smoke             # tiny, on the CPU: does the script itself run?

No network, no data: scenes are rendered while training, and the VQ tokenizer is that of the `scenes` bundle. A model of
LlamaGen-B's size (width 768, 12 layers) with so little training draws worse pictures than the bundle's; what it is for
is passes of a real model's cost with a drafter that has really learned from it. How well both have learned is printed
beside the speeds, which are measured as `lantern-rt bench` does and never judged.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lantern_rt import EngineError, LanternError, open_bundle
from lantern_rt.cli.bench import BenchCommand, print_table, run_bench
from lantern_rt.cli.running import Running
from lantern_rt.export.models.decoder import DecoderConfig
from lantern_rt.train.scenes.bundle import write_scenes_bundle
from lantern_rt.train.scenes.checkpoints import load_checkpoint
from lantern_rt.train.scenes.drafter import CFG_SCALE, train_drafter
from lantern_rt.train.scenes.model import CONFIG, SIZES, size_name
from lantern_rt.train.scenes.restore import restore_work
from lantern_rt.train.scenes.samples import write_samples
from lantern_rt.train.scenes.target import SHARD, train_target
from lantern_rt.tuning.bench import usual_ways

SAMPLE_SHARE = 1 / 6  # of the drafter's time: the target draws pictures for it to learn from
PAPER_TREES = "eagle:tree=dynamic-59,lantern:tree=dynamic-59,lantern++:tree=balanced-25"  # cheap on a GPU only


@dataclass(frozen=True)
class Plan:
    """What to train for how long, and how to measure it. methods: as `lantern-rt bench` takes them, None for all."""

    size: DecoderConfig = SIZES["llamagen-b"]
    minutes: float = 7
    drafter_minutes: float = 3
    device: str = "cuda"
    provider: str = "cuda"
    batch: int = 64
    drawn: int = 64
    shard: int = SHARD
    precisions: tuple[str, ...] = ("float32", "float16")
    methods: str | None = None
    images: int = 8


SMOKE = Plan(
    size=replace(CONFIG, hidden_size=64, num_layers=2, intermediate_size=128),
    minutes=0.03,
    drafter_minutes=0.03,
    device="cpu",
    provider="cpu",
    batch=4,
    drawn=2,
    shard=32,
    precisions=("float16",),
    methods="ar,sjd,eagle,lantern,lantern++",
    images=1,
)


def main() -> None:
    """Everything, in a folder that is removed afterwards unless one is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="llamagen-b")
    parser.add_argument("--minutes", type=float, default=Plan.minutes, help="to train the target [default: 7]")
    parser.add_argument(
        "--drafter-minutes", type=float, default=Plan.drafter_minutes, help="to train the drafter [default: 3]"
    )
    parser.add_argument("--device", default=Plan.device, help="where to train: cpu, cuda, cuda:1 [default: cuda]")
    parser.add_argument("--provider", help="where to measure: cpu, cuda, ... [default: as --device]")
    parser.add_argument("--batch", type=int, default=Plan.batch, help="scenes a training step [default: 64]")
    parser.add_argument("--precision", choices=("float32", "float16"), action="append", help="default: both")
    parser.add_argument("--methods", help="as in `lantern-rt bench` [default: all, and the papers' trees]")
    parser.add_argument("--images", type=int, default=Plan.images, help="of every method [default: 8]")
    parser.add_argument("--work", type=Path, help="keep checkpoints here; goes on with those that are there")
    parser.add_argument("--json", type=Path, help="write the figures here, not to stdout")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    plan = Plan(
        size=SIZES[arguments.size],
        minutes=arguments.minutes,
        drafter_minutes=arguments.drafter_minutes,
        device=arguments.device,
        provider=arguments.provider or arguments.device.partition(":")[0],
        batch=arguments.batch,
        precisions=tuple(arguments.precision or Plan.precisions),
        methods=arguments.methods,
        images=arguments.images,
    )
    report = end_to_end(SMOKE if arguments.smoke else plan, arguments.work)
    text = json.dumps(report, allow_nan=False)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


def end_to_end(plan: Plan, work: Path | None = None) -> dict[str, Any]:
    """Train, export, measure; prints as it goes and returns the figures, ready for JSON."""
    if plan.device.startswith("cuda") and not torch.cuda.is_available():
        raise EngineError(
            f"found torch {torch.__version__} without a CUDA device, expected one to train on; "
            "install a CUDA build of torch, or give --device cpu"
        )
    with tempfile.TemporaryDirectory() as folder:
        place = work or Path(folder) / "work"
        report = {"size": size_name(plan.size), "device": plan.device, "torch": torch.__version__}
        report |= {"training": train(plan, place), "bench": measure(plan, place, Path(folder))}
    return report


def train(plan: Plan, work: Path) -> dict[str, Any]:
    """Checkpoints in `work`; seconds of every part, and how well target and drafter have learned."""
    if not (work / "vq.pt").exists():
        restore_work("scenes", work, only_vq=True)
    device, shard, drawing = plan.device, plan.shard, plan.drafter_minutes * SAMPLE_SHARE
    parts: dict[str, Callable[[], object]] = {
        "target": lambda: train_target(
            work, plan.minutes, batch=plan.batch, device=device, size=plan.size, shard=shard
        ),
        "samples": lambda: write_samples(work, drawing, CFG_SCALE, plan.drawn, device),
        "drafter": lambda: train_drafter(
            work, plan.drafter_minutes - drawing, max(1, plan.batch // 2), device=device, shard=shard
        ),
    }
    seconds = {}
    for name, part in parts.items():
        began = time.perf_counter()
        try:
            part()
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"{device}: too little memory to train the {name}; give a --batch below {plan.batch}"
            ) from error
        seconds[name] = time.perf_counter() - began
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what is measured next is not torch's
    target, drafter = (load_checkpoint(work / f"{name}.pt") for name in ("target", "drafter"))
    found = {
        "seconds": seconds,
        "scenes": target["seen"],
        "nats_per_code": target["scores"]["all"],
        "drafter_overlap": drafter["scores"]["overlap"],
        "drafter_overlap_deep": drafter["scores"]["deep"],
    }
    print(
        f"learned: {found['nats_per_code']:.3f} nats a code on fresh scenes after {found['scenes']} scenes, "
        f"drafter overlap {found['drafter_overlap']:.3f}, {found['drafter_overlap_deep']:.3f} deep in a draft; "
        + ", ".join(f"{name} {spent:.0f} s" for name, spent in seconds.items()),
        flush=True,
    )
    return found


def measure(plan: Plan, work: Path, folder: Path) -> list[dict[str, Any]]:
    """Bundles of the work folder in every precision, each measured as `lantern-rt bench` does it."""
    reports = []
    for precision in plan.precisions:
        bundle = folder / precision
        write_scenes_bundle(work, bundle, False, lambda line: print(line, flush=True), precision)
        manifest = open_bundle(bundle).manifest
        asked = BenchCommand(
            bundle=str(bundle),
            methods=plan.methods or f"{usual_ways(manifest, (), sweep=False)},{PAPER_TREES}",
            qualities=(),
            sweep=False,
            images=plan.images,
            batch=1,
            greedy=False,
            prompts=None,
            running=Running(provider=plan.provider),
            plot=None,
            json=False,
            force=False,
        )
        print(f"\n{precision}:", flush=True)
        report = run_bench(asked)
        print_table(report)
        reports.append({"precision": precision, **report.as_dict()})
    return reports


if __name__ == "__main__":
    try:
        main()
    except LanternError as error:
        sys.exit(f"end_to_end: {error}")
