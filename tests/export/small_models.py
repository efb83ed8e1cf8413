"""Small random models that several tests write, read and compare."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from goldens import DATA
from torch import nn

from lantern_rt.export.graph.graphs import Graph, target_graph
from lantern_rt.export.models.decoder import Decoder, DecoderConfig

CONFIG = DecoderConfig(
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=96,
    vocab_size=40,
    grid=3,
    prefix=2,
    spare_positions=8,
)


def stored(dtype: torch.dtype, config: DecoderConfig = CONFIG) -> Graph:
    """A target whose weights lie in another type, as a checkpoint's may."""
    torch.manual_seed(0)
    decoder = Decoder(config).eval()
    for part in decoder.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = nn.Parameter(value.detach().to(dtype), requires_grad=False)
    return target_graph(decoder, torch.randn(config.vocab_size, config.hidden_size))


def randomise_norms(decoder: nn.Module) -> None:
    """Norms are ones and zeros at the start, which would hide a weight in the wrong place."""
    for name, weight in decoder.named_parameters():
        if "norm" in name:
            nn.init.normal_(weight)
    decoder.eval()


SIZES = {
    "vocab_size": 60,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 3,
    "feed_forward_proj": "gated-gelu",
}


def save_t5(folder: Path, whole: bool = False, **sizes: Any) -> Any:
    """A random encoder (or a whole T5) saved by `transformers`, with a tokenizer; returns the encoder."""
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(**(SIZES | sizes))
    kind = transformers.T5ForConditionalGeneration if whole else transformers.T5EncoderModel
    model = kind(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():  # the initial values leave scores and norms all alike
            weight.copy_(1 + 0.3 * torch.randn_like(weight) if "norm" in name else 0.4 * torch.randn_like(weight))
    model.save_pretrained(folder)
    shutil.copy(DATA / "tiny-text-tokenizer/tokenizer.json", folder)
    return transformers.T5EncoderModel.from_pretrained(folder).eval()
