"""Anole and other Chameleon models: a Hugging Face folder, a VQGAN and, if there is one, LANTERN's EAGLE drafter.

Chameleon reads and writes one vocabulary of text and image tokens. Image tokens are named in config.json's
`vocabulary_map`: `IMGIMG`, the code's decimal digits as letters (A is 0, J is 9), `Z`. Only their rows of the head
are kept. A prompt is `<s>`, the text, end of turn, begin of image; the unconditional row is `<s>`, begin of image.

Does not know how graphs and bundles are written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...bundle.manifest import TokenLayout
from ...errors import CheckpointError, RequestError
from ...methods import Sampling
from ..checkpoints.deferred import without_weights
from ..checkpoints.files import fill, read_config, shape_of
from ..checkpoints.folders import find_weights, read_weight_files
from ..models.decoder import Decoder
from ..models.eagle import EagleDrafter, read_drafter
from ..models.hf_decoder import decoder_sizes, rename_layers
from ..models.vqgan import read_vqgan
from ..writer import check_output, write_bundle
from .common import Drafting, Model, export_model, find_tokenizer, token_condition

_ARCHITECTURE, _LUMINA = "ChameleonForConditionalGeneration", "mask_image_logits"  # the latter is Lumina-mGPT's
_PROMPT_TOKENS = ("<s>", "<reserved08706>", "<racm3:break>")  # start, end of turn, begin of image
_VQ_PREFIX = "model.vqmodel."  # the image encoder inside the folder: the VQGAN's files have it whole
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# LANTERN's settings for Anole: guidance 3, the 2000 likeliest codes, top-p before top-k.
_SAMPLING = Sampling(cfg_scale=3.0, top_k=2000, filter_order="top-p, top-k")


@dataclass(frozen=True)
class Chameleon:
    """A target taken apart. `embeddings [vocabulary, width]` of all tokens; code c is token `codes[c]`."""

    decoder: Decoder
    embeddings: Tensor
    layout: TokenLayout
    codes: list[int]
    files: list[tuple[str, Path]]
    named_tokens: dict[str, int]


def export_anole(
    target: Path,
    vq: Path,
    output: Path,
    *,
    drafter: Path | None = None,
    grid: int | None = None,
    name: str | None = None,
    force: bool = False,
    origins: Mapping[Path, str] | None = None,
    progress: Callable[[str], None] | None = None,
    write: Callable[..., Path] = write_bundle,
) -> Path:
    """Export a Chameleon folder with its VQGAN; returns the bundle's folder.

    `vq`: a folder with vqgan.ckpt and vqgan.yaml, or the .ckpt. `drafter`: a folder in LANTERN's layout. `grid`:
    rows of codes, by default those of the VQGAN's own resolution. `origins` tells of files or folders where they were
    fetched from, for the manifest. `write`: as in `export_model`.
    """
    check_output(output, force)
    if grid is not None and not 1 <= grid <= 256:
        raise RequestError(f"grid is {grid}, expected 1 to 256 code rows")
    tokenizer = find_tokenizer(target)
    if progress:
        progress("reading checkpoints")
    image = read_vqgan(vq)
    rows = grid or image.grid
    if rows is None:
        raise CheckpointError(f"{vq}: no .yaml beside the .ckpt tells the size of pictures; give --grid")
    chameleon = read_chameleon(target, rows)
    tokens = len(chameleon.embeddings)
    draft = None if drafter is None else read_drafter(drafter, chameleon.decoder, tokens)
    if draft is not None:
        arrange_codes(draft.drafter, chameleon.codes)
    sources = [*chameleon.files, ("tokenizer", tokenizer), *(("vq", path) for path in image.files)]
    sources += [] if draft is None else draft.files
    model = Model(
        family="anole",
        decoder=chameleon.decoder,
        code_embeddings=_rows(chameleon.embeddings, chameleon.codes),
        condition=token_condition(
            chameleon.embeddings,
            chameleon.decoder.config.prefix,
            chameleon.layout,
            tokenizer,
            chameleon.named_tokens,
        ),
        vq=image.vq,
        sampling=_SAMPLING,
        sources=sources,
        drafting=None if draft is None else Drafting(draft.drafter, code_offset=min(chameleon.codes)),
    )
    return export_model(model, output, name=name, force=force, origins=origins, progress=progress, write=write)


def read_chameleon(folder: Path, grid: int) -> Chameleon:
    """The decoder in a Hugging Face folder, for pictures of `grid` rows and columns of codes."""
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise CheckpointError(f"{folder}: expected a Hugging Face folder with config.json and weights")
    config = read_config(config_path)
    if config.get("model_type") != "chameleon":
        raise CheckpointError(f"{config_path}: model_type is {config.get('model_type')!r}, expected 'chameleon'")
    if config.get("architectures", [_ARCHITECTURE]) != [_ARCHITECTURE] or _LUMINA in config:
        found_name = _LUMINA if _LUMINA in config else f"architectures {config['architectures']}"
        raise CheckpointError(
            f"{config_path}: found {found_name}, expected a {_ARCHITECTURE}; Lumina-mGPT and its kin are not supported"
        )
    codes, layout = _read_vocabulary(config, config_path)
    found = find_weights(folder)
    weights = read_weight_files(found, keep=lambda name: not name.startswith(_VQ_PREFIX))
    for name in (_EMBEDDINGS, _HEAD):
        if shape_of(weights, name, 2, folder)[0] <= max(codes):
            raise CheckpointError(
                f"{folder}: {name} has {len(weights[name])} rows, but {config_path.name} has image tokens up to "
                f"{max(codes)}"
            )
    embeddings, head = weights.pop(_EMBEDDINGS), weights.pop(_HEAD)
    sizes = decoder_sizes(config, config_path, weights, folder, "model.", len(codes), grid)
    named, shown = rename_layers(weights, "model.", sizes.num_layers, sizes.hidden_size, folder)
    with without_weights():
        decoder = Decoder(sizes)
    fill(decoder, named | {"head.weight": _rows(head, codes)}, folder, shown | {"head.weight": _HEAD})
    files = [("target", path) for path in found.all_files]
    named_tokens = {name: config["vocabulary_map"][name] for name in _PROMPT_TOKENS}
    return Chameleon(decoder, embeddings, layout, codes, [*files, ("target_config", config_path)], named_tokens)


def arrange_codes(drafter: EagleDrafter, codes: list[int]) -> None:
    """Put the drafter's embeddings of codes in order: code c at the first code's token + c."""
    first, table = min(codes), drafter.embed.weight
    if codes != list(range(first, first + len(codes))):
        ordered = table.clone()
        ordered[first : first + len(codes)] = _rows(table, codes)
        drafter.embed.weight = nn.Parameter(ordered, requires_grad=False)


def _rows(table: Tensor, codes: list[int]) -> Tensor:
    """The rows of codes; a view where they lie in order, as they do in published models."""
    first = min(codes)
    if codes == list(range(first, first + len(codes))):
        return table[first : first + len(codes)]
    return table[torch.tensor(codes)]


def _read_vocabulary(config: Mapping[str, Any], path: Path) -> tuple[list[int], TokenLayout]:
    """The token of every code, and how prompts are laid out."""
    names = config.get("vocabulary_map")
    if not isinstance(names, dict) or any(type(token) is not int or token < 0 for token in names.values()):
        raise CheckpointError(
            f"{path}: has no vocabulary_map from names to token ids, expected one that names the codes"
        )
    if missing := [name for name in _PROMPT_TOKENS if name not in names]:
        raise CheckpointError(f"{path}: vocabulary_map lacks {', '.join(missing)}")
    tokens = {_code(name): token for name, token in names.items() if re.fullmatch("IMGIMG[A-J]+Z", name)}
    ids = sorted(tokens.values())
    block = len(ids) > 1 and ids == list(range(ids[0], ids[0] + len(ids)))
    if not block or sorted(tokens) != list(range(len(ids))):
        raise CheckpointError(
            f"{path}: vocabulary_map names {len(tokens)} image tokens (IMGIMG..Z), expected those of the codes "
            "0, 1, ... with ids in one block"
        )
    start, end, begin = (names[name] for name in _PROMPT_TOKENS)
    return [tokens[code] for code in range(len(ids))], TokenLayout(
        before=(start,), after=(end, begin), uncond=(start, begin)
    )


def _code(name: str) -> int:
    letters = name.removeprefix("IMGIMG").removesuffix("Z")
    return int("".join(str(ord(letter) - ord("A")) for letter in letters))
