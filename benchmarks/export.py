"""What an export costs: seconds, peak memory and size of the bundle, on random checkpoints of published shapes.

    python benchmarks/export.py --shape GPT-XL --precision fp16
    python benchmarks/export.py --shape Anole-7B --precision fp16 --keep
    python benchmarks/export.py --shape tiny                       # does it still run?

The checkpoint has LlamaGen's layout, whatever the shape, and is written to disk piece by piece first; with the
bundle it takes twice the model's size in `--work` (default `work/`, which git ignores) and is removed afterwards,
but for the bundle with `--keep`. Memory is what the process holds without mapped files (RssAnon), at its highest
during the export; it is judged against 1.3 x the largest layer as stored in the bundle + 1.5 GB.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lantern_rt.export.bundle_writer import write_bundle
from lantern_rt.export.llamagen import export_llamagen
from lantern_rt.export.llamagen_vq import LlamaGenVQ, VQConfig
from lantern_rt.export.precision import read_precisions
from lantern_rt.memory import PeakMemory

BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16-safe": 2.0, "int8-weights": 1.0625, "int4-weights": 0.625}
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
CLASSES = 1000


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    width: int
    ffn_width: int
    codes: int
    grid: int
    dtype: torch.dtype
    vq_width: int = 128

    @property
    def layer_numbers(self) -> int:
        return 4 * self.width**2 + 3 * self.width * self.ffn_width


# The 7B shape has a narrow tokenizer: comparing 512-pixel pictures would take longer than all the rest.
SHAPES = {
    "tiny": Shape(2, 4, 64, 128, 128, 4, torch.bfloat16, 32),
    "GPT-B": Shape(12, 12, 768, 2048, 16384, 16, torch.float32),
    "GPT-XL": Shape(36, 20, 1280, 3584, 16384, 16, torch.float32),
    "GPT-3B": Shape(24, 32, 3200, 8704, 16384, 24, torch.float32),
    "Anole-7B": Shape(32, 32, 4096, 11008, 8192, 32, torch.bfloat16, 32),
}


def weights(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of an official class-conditional LlamaGen transformer."""
    width = shape.width
    yield "tok_embeddings.weight", (shape.codes, width)
    yield "cls_embedding.embedding_table.weight", (CLASSES + 1, width)
    for i in range(shape.layers):
        yield f"layers.{i}.attention.wqkv.weight", (3 * width, width)
        yield f"layers.{i}.attention.wo.weight", (width, width)
        yield f"layers.{i}.feed_forward.w1.weight", (shape.ffn_width, width)
        yield f"layers.{i}.feed_forward.w3.weight", (shape.ffn_width, width)
        yield f"layers.{i}.feed_forward.w2.weight", (width, shape.ffn_width)
        yield f"layers.{i}.attention_norm.weight", (width,)
        yield f"layers.{i}.ffn_norm.weight", (width,)
    yield "norm.weight", (width,)
    yield "output.weight", (shape.codes, width)


def write_checkpoint(shape: Shape, path: Path) -> None:
    """A safetensors file, tensor by tensor; matrices keep the size of what they multiply."""
    header: dict[str, object] = {}
    at = 0
    for name, size in weights(shape):
        end = at + torch.Size(size).numel() * shape.dtype.itemsize
        header[name] = {"dtype": DTYPES[shape.dtype], "shape": size, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator().manual_seed(0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, size in weights(shape):
            if len(size) == 1:
                file.write(torch.ones(size, dtype=shape.dtype).view(torch.uint8).numpy().data)
                continue
            row = torch.randn(1 << 22, generator=generator) * (0.5 / size[1] ** 0.5)
            block = row.to(shape.dtype).view(torch.uint8).numpy().data  # numbers repeat; what they cost does not
            left = torch.Size(size).numel() * shape.dtype.itemsize
            while left:
                left -= file.write(block[:left])


def write_vq(shape: Shape, path: Path) -> None:
    """A tokenizer of the published widths with random weights."""
    torch.manual_seed(0)
    widths = tuple(shape.vq_width * m for m in (1, 1, 2, 2, 4))
    vq = LlamaGenVQ(VQConfig(shape.codes, 8, 256, shape.vq_width, widths, widths[::-1], 2))
    state = vq.state_dict()
    state["quantize.embedding.weight"] = torch.randn_like(state.pop("codebook"))
    torch.save({"model": state}, path)


def main() -> int:
    parser = argparse.ArgumentParser(description="What an export costs.")
    parser.add_argument("--shape", choices=SHAPES, default="GPT-XL")
    parser.add_argument("--precision", choices=BYTES, default="fp16")
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder for checkpoint and bundle")
    parser.add_argument("--keep", action="store_true", help="keep the bundle")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    work = arguments.work / f"export-{arguments.shape}"
    work.mkdir(parents=True)
    try:
        start = time.perf_counter()
        target, vq, config = work / "target.safetensors", work / "vq.pt", work / "config.json"
        write_checkpoint(shape, target)
        write_vq(shape, vq)
        config.write_text(json.dumps({"n_head": shape.heads}))
        print(f"checkpoint: {target.stat().st_size / 1e9:.2f} GB in {time.perf_counter() - start:.0f} s")
        start = time.perf_counter()
        bundle = arguments.work / f"bundle-{arguments.shape}-{arguments.precision}"
        with PeakMemory() as peak:
            export_llamagen(
                target,
                vq,
                bundle,
                config=config,
                grid=shape.grid,
                write=partial(write_bundle, precisions=read_precisions(arguments.precision)),
                progress=lambda line: print(
                    f"  {time.perf_counter() - start:6.1f} s  {(peak.bytes or 0) / 1e9:5.2f} GB  {line}", flush=True
                ),
            )
        seconds = time.perf_counter() - start
    finally:
        shutil.rmtree(work)
    size = sum(file.stat().st_size for file in bundle.iterdir())
    bound = 1.3 * shape.layer_numbers * BYTES[arguments.precision] + 1.5e9
    print(
        f"{arguments.shape} {arguments.precision}: {seconds:.0f} s, peak memory {(peak.bytes or 0) / 1e9:.2f} GB "
        f"(allowed {bound / 1e9:.2f}), bundle {size / 1e9:.2f} GB"
    )
    if arguments.json:
        figures = {"seconds": seconds, "peak_bytes": peak.bytes, "allowed_bytes": bound, "bundle_bytes": size}
        arguments.json.write_text(json.dumps({"shape": arguments.shape, **vars(arguments), **figures}, default=str))
    if not arguments.keep:
        shutil.rmtree(bundle)
    return 0 if (peak.bytes or 0) <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
