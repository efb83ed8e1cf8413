"""The scenes target model: caption slots, code tables and the shared decoder.

The code embedding and the output head are each a learned table plus a linear map of Fourier features of
the code's codebook vector. Codes that look alike start out alike; both fold into plain tables.

A size is a `DecoderConfig`. Every checkpoint contains it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_rt.errors import RequestError
from lantern_rt.export.models.decoder import Decoder, DecoderConfig

from .text import SLOTS, WORDS
from .vq import CODE_DIM, GRID, ScenesVQConfig

CONFIG = DecoderConfig(
    hidden_size=320,
    num_layers=8,
    num_heads=5,
    num_kv_heads=5,
    intermediate_size=896,
    vocab_size=ScenesVQConfig().codes,
    grid=GRID,
    prefix=SLOTS,
    prefix_rotation="identity",
)
GUIDANCE = 3.0  # CFG scale of targets that it is not distilled into
SIZES: Mapping[str, DecoderConfig] = {
    "default": CONFIG,
    "llamagen-b": replace(
        CONFIG, hidden_size=768, num_layers=12, num_heads=12, num_kv_heads=12, intermediate_size=2048
    ),
}


def find_target_config(name: str) -> DecoderConfig:
    """Return the size with this name; RequestError if there is none."""
    if name not in SIZES:
        raise RequestError(field="size", found=repr(name), expected=f"one of {', '.join(SIZES)}")
    return SIZES[name]


def format_size_name(config: DecoderConfig) -> str:
    """Return the name of a target's size, whatever its codes; its width and layers if it has no name."""
    named = (name for name, size in SIZES.items() if replace(size, vocab_size=config.vocab_size) == config)
    return next(named, f"{config.hidden_size}x{config.num_layers}")


class CodeEmbeddingTable(nn.Module):
    """A table `[codes, width]`: learned rows plus a map of fixed features of the codebook vectors."""

    features: Tensor

    def __init__(self, codebook: Tensor, width: int, init_scale: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        waves = torch.randn(CODE_DIM, 96, generator=generator) * torch.linspace(0.5, 3.0, 96)
        angles = codebook @ waves * math.pi
        self.register_buffer("features", torch.cat([codebook, angles.sin(), angles.cos()], 1))
        self.rows = nn.Parameter(torch.randn(len(codebook), width) * 0.5 * init_scale)
        self.map = nn.Parameter(torch.randn(self.features.shape[1], width) * init_scale / 10)

    def forward(self) -> Tensor:
        return self.rows + self.features @ self.map


class ScenesTarget(nn.Module):
    """Text-conditional decoder over codes.

    A sequence is 24 caption slots followed by codes; slot rows are word embedding plus slot embedding,
    or the learned `uncond_embedding` where there is no caption.
    """

    def __init__(self, codebook: Tensor, config: DecoderConfig = CONFIG) -> None:
        super().__init__()
        self.config = config
        self.words = nn.Embedding(len(WORDS), config.hidden_size)
        self.slots = nn.Parameter(torch.randn(SLOTS, config.hidden_size) * 0.3)
        self.uncond_embedding = nn.Parameter(torch.randn(SLOTS, config.hidden_size) * 0.3)
        self.code_embedding = CodeEmbeddingTable(codebook, config.hidden_size, 1.0)
        self.code_head = CodeEmbeddingTable(codebook, config.hidden_size, config.hidden_size**-0.5)
        self.decoder = Decoder(config)
        for name, weight in self.decoder.named_parameters():
            if weight.ndim == 2:
                spread = weight.shape[1] ** -0.5
                nn.init.normal_(weight, std=spread * (0.3 if name.endswith(("out.weight", "down.weight")) else 1.0))
        del self.decoder.head  # the head is `code_head` until `fold_code_tables`

    def prefix(self, caption_ids: Tensor, dropped_captions: Tensor | None = None) -> Tensor:
        """Return prefix embeddings `[rows, 24, width]`; rows marked in `dropped_captions` lose their caption."""
        embeds: Tensor = self.words(caption_ids) + self.slots
        if dropped_captions is not None:
            embeds = torch.where(dropped_captions[:, None, None], self.uncond_embedding, embeds)
        return embeds

    def compute_hidden_states(self, prefix: Tensor, codes: Tensor) -> Tensor:
        """Return hidden states `[rows, codes, width]` that predict each of `codes [rows, n]`."""
        inputs = F.embedding(codes[:, :-1], self.code_embedding())
        states = self.decoder.forward_sequences(torch.cat([prefix, inputs], 1))
        return states[:, SLOTS - 1 :]

    def logits(self, captions: Tensor, codes: Tensor, dropped_captions: Tensor | None = None) -> Tensor:
        """Return unguided logits `[rows, 256, vocab]`; rows marked in `dropped_captions [rows]` get no caption."""
        return self.compute_hidden_states(self.prefix(captions, dropped_captions), codes) @ self.code_head().T

    def fold_code_tables(self) -> tuple[Decoder, Tensor]:
        """Return the plain decoder with its head, and the code embedding table `[codes, width]`."""
        plain = Decoder(self.config).to(self.slots.device)
        state = self.decoder.state_dict()
        state["head.weight"] = self.code_head().detach()
        plain.load_state_dict(state)
        return plain.eval(), self.code_embedding().detach()
