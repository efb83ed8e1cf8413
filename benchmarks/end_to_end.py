"""Train a scenes target and its drafter here, export them, and measure every method against plain decoding.

    python benchmarks/end_to_end.py                     # LlamaGen-B's size on a GPU: about a quarter of an hour
    python benchmarks/end_to_end.py --batch 16          # where its memory is small
    python benchmarks/end_to_end.py --device cpu --size default --minutes 60 --drafter-steps 2000
    python benchmarks/end_to_end.py --smoke             # tiny, on the CPU: does the script itself run?

No network, no data: scenes are rendered while training, and the VQ tokenizer is that of the `scenes` bundle. A model of
LlamaGen-B's size (width 768, 12 layers) with so little training draws worse pictures than the bundle's; what it is for
is passes of a real model's cost with a drafter that has really learned from it. How well both have learned is printed
beside the speeds, which are measured as `lantern-rt bench` does: nats per token of the target on fresh scenes, and what
`lantern-rt train-drafter` says of the drafter. Nothing is judged.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from decode import compare

from lantern_rt import EngineError, LanternError, Pipeline
from lantern_rt.export.models.decoder import DecoderConfig

sys.path.append(str(Path(__file__).resolve().parents[1]))  # recipes/ is not installed

from recipes.scenes.bundle import write_scenes_bundle
from recipes.scenes.checkpoints import load_checkpoint
from recipes.scenes.drafter import train_drafter, write_samples
from recipes.scenes.model import CONFIG, SIZES, size_name
from recipes.scenes.restore import restore_work
from recipes.scenes.target import SHARD, train_target

PAPERS = ("eagle:tree=dynamic-59", "lantern:tree=dynamic-59", "lantern++:tree=balanced-25")  # cheap on a GPU only
METHODS = ("ar", "sjd", "eagle:tree=chain-5", "lantern", "lantern++", *PAPERS)
SMOKE_SIZE = replace(CONFIG, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=4, intermediate_size=128)
SMOKE = {"minutes": 0.03, "pictures": 4, "drafter_steps": 2, "device": "cpu", "provider": "cpu", "batch": 4}
SMOKE |= {"images": 1, "methods": ("ar", "sjd", "eagle", "lantern", "lantern++")}


def main() -> None:
    """Train, export, measure, in a folder that is removed afterwards unless one is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="llamagen-b")
    parser.add_argument("--minutes", type=float, default=7, help="to train the target in all [default: 7]")
    parser.add_argument("--pictures", type=int, default=1024, help="that the drafter learns from [default: 1024]")
    parser.add_argument("--drafter-steps", type=int, default=1500, help="to train the drafter [default: 1500]")
    parser.add_argument("--device", default="cuda", help="where to train: cpu, cuda, cuda:1 [default: cuda]")
    parser.add_argument("--provider", help="where to measure: cpu, cuda, ... [default: as --device]")
    parser.add_argument("--batch", type=int, default=64, help="scenes a training step [default: 64]")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="[default: all, and papers' trees]")
    parser.add_argument("--images", type=int, default=8, help="of every method [default: 8]")
    parser.add_argument("--work", type=Path, help="keep checkpoints here; goes on with those that are there")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if arguments.smoke:
        vars(arguments).update(SMOKE)
    size = SMOKE_SIZE if arguments.smoke else SIZES[arguments.size]
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        found = f"torch {torch.__version__} without a CUDA device"
        raise EngineError(field="device", found=found, remedy="install a CUDA build of torch, or give --device cpu")
    report: dict[str, Any] = {
        "size": size_name(size),
        "device": arguments.device,
        "torch": torch.__version__,
        "bench": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        work = arguments.work or Path(folder) / "work"
        report["training"] = train(arguments, size, work)
        for precision in ("float16",) if arguments.smoke else ("float32", "float16"):
            bundle = write_scenes_bundle(work, Path(folder) / precision, False, print, precision)
            print(f"\n{precision}:", flush=True)
            provider = arguments.provider or arguments.device.partition(":")[0]
            rows = compare(Pipeline.from_bundle(bundle, provider=provider), arguments.methods, arguments.images)
            report["bench"].append({"precision": precision, "rows": rows})
    if arguments.json:
        arguments.json.write_text(json.dumps(report, allow_nan=False) + "\n", encoding="utf-8")


def train(arguments: argparse.Namespace, size: DecoderConfig, work: Path) -> dict[str, Any]:
    """Checkpoints in `work`; seconds of every part, and how well target and drafter have learned."""
    if not (work / "vq.pt").exists():
        restore_work("scenes", work, only_vq=True)
    device, batch, shard = arguments.device, arguments.batch, 32 if arguments.smoke else SHARD
    provider, drawn_together = arguments.provider or device.partition(":")[0], 2 if arguments.smoke else 64
    parts: dict[str, Callable[[], Any]] = {
        "target": lambda: train_target(work, arguments.minutes, batch=batch, device=device, size=size, shard=shard),
        "samples": lambda: write_samples(work, arguments.pictures, drawn_together, provider),
        "drafter": lambda: train_drafter(work, arguments.drafter_steps, max(1, batch // 2), device),
    }
    seconds, results = {}, {}
    for name, part in parts.items():
        began = time.perf_counter()
        try:
            results[name] = part()
        except torch.OutOfMemoryError as error:
            raise EngineError(f"{device}: too little memory for the {name}; give a --batch below {batch}") from error
        seconds[name] = time.perf_counter() - began
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what is measured next is not torch's
    scores = load_checkpoint(work / "target.pt")["scores"]
    found = {"seconds": seconds, "target_nats_per_token": scores, "drafter": results["drafter"]}
    print(json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    try:
        main()
    except LanternError as error:
        sys.exit(f"end_to_end.py: {error}")
