"""Target model of `scenes`: a decoder that predicts the 256 image tokens (codes) after 24 caption words.

The code embedding and the output head are each a learned table plus a linear map of Fourier features of the codebook
vectors. So codes of similar vectors have similar embeddings from the start of training. After training, each sum
becomes one table.

A `DecoderConfig` describes the size of a target. Every checkpoint contains the config of its target.
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
GUIDANCE = 3.0  # CFG scale of targets into which guidance has not been distilled
SIZES: Mapping[str, DecoderConfig] = {
    "default": CONFIG,
    "llamagen-b": replace(
        CONFIG, hidden_size=768, num_layers=12, num_heads=12, num_kv_heads=12, intermediate_size=2048
    ),
}


def find_target_config(name: str) -> DecoderConfig:
    """Return the decoder config of a size by name.

    Raises:
        RequestError: `SIZES` does not have the name.
    """
    if name not in SIZES:
        raise RequestError(field="size", found=repr(name), expected=f"one of {', '.join(SIZES)}")
    return SIZES[name]


def format_size_name(config: DecoderConfig) -> str:
    """Return the name of a target's size, or `<width>x<layers>` if the size has no name.

    The codebook size is not compared, because it depends on the VQ tokenizer.
    """
    named = (name for name, size in SIZES.items() if replace(size, vocab_size=config.vocab_size) == config)
    return next(named, f"{config.hidden_size}x{config.num_layers}")


class CodeEmbeddingTable(nn.Module):
    """Table `[codes, width]`, the sum of a learned table and a linear map of fixed features of the codebook vectors.

    Args:
        codebook: codebook vectors, `[codes, 8]`.
        width: number of columns of the table.
        init_scale: factor of the initial weights.
    """

    features: Tensor

    def __init__(self, codebook: Tensor, width: int, init_scale: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)  # a fixed seed, so that all models have the same features
        waves = torch.randn(CODE_DIM, 96, generator=generator) * torch.linspace(0.5, 3.0, 96)
        angles = codebook @ waves * math.pi
        self.register_buffer("features", torch.cat([codebook, angles.sin(), angles.cos()], 1))
        self.rows = nn.Parameter(torch.randn(len(codebook), width) * 0.5 * init_scale)
        self.map = nn.Parameter(torch.randn(self.features.shape[1], width) * init_scale / 10)

    def forward(self) -> Tensor:
        return self.rows + self.features @ self.map


class ScenesTarget(nn.Module):
    """Decoder that predicts the codes of an image after a caption.

    A sequence has 24 positions for the words of the caption, followed by the codes. The embedding at a caption position
    is the word embedding plus the embedding of the position. Without caption it is the learned `uncond_embedding`.

    Args:
        codebook: codebook vectors of the VQ tokenizer, `[codes, 8]`.
        config: sizes of the decoder.
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
                # Layers that write to the residual stream start smaller, so that a new layer changes little.
                nn.init.normal_(weight, std=spread * (0.3 if name.endswith(("out.weight", "down.weight")) else 1.0))
        del self.decoder.head  # `code_head` replaces this layer during training; `fold_code_tables` restores it

    def prefix(self, caption_ids: Tensor, dropped_captions: Tensor | None = None) -> Tensor:
        """Compute the embeddings of captions.

        Args:
            caption_ids: word ids, int64 `[rows, 24]`.
            dropped_captions: bool `[rows]`, true for rows without caption; None: all rows have captions.

        Returns:
            Embeddings `[rows, 24, width]`.
        """
        embeds: Tensor = self.words(caption_ids) + self.slots
        if dropped_captions is not None:
            embeds = torch.where(dropped_captions[:, None, None], self.uncond_embedding, embeds)
        return embeds

    def compute_hidden_states(self, prefix: Tensor, codes: Tensor) -> Tensor:
        """Compute the hidden states that predict each code.

        Args:
            prefix: embeddings of the captions, `[rows, 24, width]`.
            codes: image tokens, int64 `[rows, n]`; the last code is only predicted, not read.

        Returns:
            Hidden states `[rows, n, width]`.
        """
        inputs = F.embedding(codes[:, :-1], self.code_embedding())
        states = self.decoder.forward_sequences(torch.cat([prefix, inputs], 1))
        return states[:, SLOTS - 1 :]  # the last caption position predicts the first code

    def logits(self, captions: Tensor, codes: Tensor, dropped_captions: Tensor | None = None) -> Tensor:
        """Compute the logits of each code, without guidance.

        Args:
            captions: word ids, int64 `[rows, 24]`.
            codes: image tokens, int64 `[rows, 256]`.
            dropped_captions: bool `[rows]`, true for rows without caption; None: all rows have captions.

        Returns:
            Logits `[rows, 256, vocab]`.
        """
        return self.compute_hidden_states(self.prefix(captions, dropped_captions), codes) @ self.code_head().T

    def fold_code_tables(self) -> tuple[Decoder, Tensor]:
        """Return a decoder with an ordinary output head, and the code embeddings as one table `[codes, width]`."""
        plain = Decoder(self.config).to(self.slots.device)
        state = self.decoder.state_dict()
        state["head.weight"] = self.code_head().detach()
        plain.load_state_dict(state)
        return plain.eval(), self.code_embedding().detach()
