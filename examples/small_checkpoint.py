"""Write a small LlamaGen checkpoint with random weights in the official layout: `python examples/small_checkpoint.py`.

It replaces files of hundreds of megabytes while you try the export. The model has 10 classes and a codebook of 64
codes. It generates 6 x 6 codes, an image of 96 x 96 pixels of noise. PyTorch is needed (extra `export`).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from lantern_rt.export.models.llamagen_vq import LlamaGenVQ, VQTokenizerConfig

NUM_CLASSES = 10
NUM_CODES = 64
WIDTH = 64
NUM_LAYERS = 2
NUM_HEADS = 4
GRID = 6


def make_target_weights() -> dict[str, torch.Tensor]:
    """Return random weights of the target by their official names; norm weights are 1."""
    shapes = {
        "cls_embedding.embedding_table.weight": (NUM_CLASSES + 1, WIDTH),
        "tok_embeddings.weight": (NUM_CODES, WIDTH),
        "norm.weight": (WIDTH,),
        "output.weight": (NUM_CODES, WIDTH),
    }
    for layer in range(NUM_LAYERS):
        shapes |= {
            f"layers.{layer}.attention_norm.weight": (WIDTH,),
            f"layers.{layer}.attention.wqkv.weight": (3 * WIDTH, WIDTH),
            f"layers.{layer}.attention.wo.weight": (WIDTH, WIDTH),
            f"layers.{layer}.ffn_norm.weight": (WIDTH,),
            f"layers.{layer}.feed_forward.w1.weight": (256, WIDTH),
            f"layers.{layer}.feed_forward.w2.weight": (WIDTH, 256),
            f"layers.{layer}.feed_forward.w3.weight": (256, WIDTH),
        }
    return {name: torch.ones(shape) if len(shape) == 1 else 0.2 * torch.randn(shape) for name, shape in shapes.items()}


def make_tokenizer_weights() -> dict[str, torch.Tensor]:
    """Return random weights of an image tokenizer with 16 pixels per code, narrower than the published one."""
    vq = LlamaGenVQ(VQTokenizerConfig(NUM_CODES, 8, 32, 32, (32,) * 5, (32,) * 5, 1))
    vq.codebook = torch.randn(NUM_CODES, 8)
    return {name.replace("codebook", "quantize.embedding.weight"): weight for name, weight in vq.state_dict().items()}


def main(folder: Path = Path("small")) -> None:
    """Write weights to `c2i.pt` and `vq.pt`, and the settings that weights do not contain to `config.json`."""
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    torch.save({"model": make_target_weights()}, folder / "c2i.pt")
    torch.save({"model": make_tokenizer_weights()}, folder / "vq.pt")
    (folder / "config.json").write_text(json.dumps({"n_head": NUM_HEADS, "block_size": GRID**2}), "utf-8")


if __name__ == "__main__":
    main()
