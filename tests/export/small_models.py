"""Small random models that several tests write, read and compare."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from goldens import DATA
from torch import nn

from lantern_rt.export.graph.graphs import Graph, make_target_graph
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


def make_target(dtype: torch.dtype, config: DecoderConfig = CONFIG) -> Graph:
    torch.manual_seed(0)
    decoder = Decoder(config).eval()
    for module in decoder.modules():
        for name, value in module._parameters.items():
            if value is not None:
                module._parameters[name] = nn.Parameter(value.detach().to(dtype), requires_grad=False)
    return make_target_graph(decoder, torch.randn(config.vocab_size, config.hidden_size))


def randomise_norms(decoder: nn.Module) -> None:
    """Replace the weights of norms, 1 and 0 at first, by random ones, so that a misplaced weight changes the output."""
    for name, weight in decoder.named_parameters():
        if "norm" in name:
            nn.init.normal_(weight)
    decoder.eval()


T5_SIZES = {
    "vocab_size": 60,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 3,
    "feed_forward_proj": "gated-gelu",
}


def save_t5(folder: Path, whole: bool = False, **sizes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(**(T5_SIZES | sizes))
    model_class = transformers.T5ForConditionalGeneration if whole else transformers.T5EncoderModel
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():  # initial values would make scores and norms too similar
            weight.copy_(1 + 0.3 * torch.randn_like(weight) if "norm" in name else 0.4 * torch.randn_like(weight))
    model.save_pretrained(folder)
    shutil.copy(DATA / "tiny-text-tokenizer/tokenizer.json", folder)
    return transformers.T5EncoderModel.from_pretrained(folder).eval()
