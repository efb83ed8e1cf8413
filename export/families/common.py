"""What model families share: from a model taken apart to a bundle.

A family reads its files into a `Model`; `export_model` does the rest. See docs/adding-a-family.md.

Does not know any family, nor how graphs and bundles are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor, nn

from ... import __version__
from ...bundle.manifest import (
    ConditionSpec,
    DecoderSpec,
    DecodingDefaults,
    DrafterSpec,
    Provenance,
    Source,
    TokenLayout,
    file_sha256,
)
from ...errors import CheckpointError
from ...methods import Eagle, Lantern, LanternPlusPlus, Sampling
from ..graph.graphs import Arrays, Case, Graph, target_graph
from ..graph.onnx_ops import Ops, Value
from ..models.decoder import Decoder, DecoderConfig
from ..models.eagle import EagleDrafter, drafter_graph
from ..models.llamagen_vq import LlamaGenVQ, VQDecoder, VQEncoder
from ..neighbours import neighbour_table
from ..writer import check_output, write_bundle

_LICENCE = "unknown (see the checkpoint's source)"
_TOKENIZER = "tokenizer.json"
_LARGE_PICTURE = 256  # pixels a side, beyond which a check with more than one picture takes too much memory


@dataclass(frozen=True)
class Condition:
    """How what is asked for becomes prefix rows; for prompts of token ids, see `token_condition`.

    spec: as the manifest tells it. graph: of the role `condition`. tokenizer: the content of a `tokenizer.json` of
    Hugging Face's `tokenizers`, where prompts are text.
    """

    spec: ConditionSpec
    graph: Graph
    tokenizer: bytes | None = None


@dataclass(frozen=True)
class Drafting:
    """A drafter, and how the runtime feeds it; the fields are those of `DrafterSpec` in the manifest."""

    drafter: EagleDrafter
    masks_prefix: bool = True
    code_offset: int = 0


@dataclass(frozen=True)
class Model:
    """A model taken apart: all that a bundle needs.

    code_embeddings `[codes, width]`: the target's input rows for codes. sources: files by role, for the bundle's
    provenance.
    """

    family: str
    decoder: Decoder
    code_embeddings: Tensor
    condition: Condition
    vq: LlamaGenVQ
    sampling: Sampling
    sources: list[tuple[str, Path]]
    drafting: Drafting | None = None


def export_model(
    model: Model,
    output: Path,
    *,
    name: str | None = None,
    force: bool = False,
    origins: Mapping[Path, str] | None = None,
    progress: Callable[[str], None] | None = None,
    write: Callable[..., Path] = write_bundle,
) -> Path:
    """Write the bundle of a model; returns its folder. `origins` tells of files or folders where they
    were fetched from.

    `write` takes the bundle's parts as `write_bundle` does; give a partial one for other precisions.
    """
    check_output(output, force)
    sizes = model.decoder.config
    if model.vq.config.codes != sizes.vocab_size:
        raise CheckpointError(
            f"the VQ tokenizer has {model.vq.config.codes} codes, but the transformer has {sizes.vocab_size}; "
            "give the one that belongs to it"
        )
    if progress:
        progress("sorting neighbours")
    neighbours = neighbour_table(model.vq.codebook.numpy())
    pixels = sizes.grid * model.vq.config.scale
    fields = {
        "name": name or output.resolve().name,
        "family": model.family,
        "grid_rows": sizes.grid,
        "grid_columns": sizes.grid,
        "codebook_size": sizes.vocab_size,
        "image_height": pixels,
        "image_width": pixels,
        "target": _decoder_spec(sizes),
        "drafter": None if model.drafting is None else _drafter_spec(model.drafting),
        "condition": model.condition.spec,
        "sampling": model.sampling,
        "decoding": _decoding_defaults(model.drafting is not None, neighbours.indices.shape[1]),
        "provenance": Provenance(
            exporter=f"lantern-rt {__version__}",
            sources=tuple(_source(role, path, origins or {}) for role, path in model.sources),
            licence=_LICENCE,
        ),
    }
    graphs = [target_graph(model.decoder, model.code_embeddings)]
    graphs += [] if model.drafting is None else [drafter_graph(model.drafting.drafter)]
    graphs += [model.condition.graph, *vq_graphs(model.vq, sizes.grid)]
    tokenizer = model.condition.tokenizer
    return write(
        output,
        graphs=graphs,
        code_embeddings=model.code_embeddings.float().numpy(),
        fields=fields,
        neighbours=neighbours,
        files=None if tokenizer is None else {"tokenizer": (_TOKENIZER, tokenizer)},
        force=force,
        progress=progress,
    )


def find_tokenizer(folder: Path) -> Path:
    """The `tokenizer.json` of a checkpoint's folder; CheckpointError if there is none."""
    path = folder / _TOKENIZER
    if not path.is_file():
        raise CheckpointError(f"{folder}: has no {_TOKENIZER}; download it into that folder, prompts need it")
    return path


def token_condition(
    embeddings: Tensor, prefix: int, layout: TokenLayout, tokenizer: Path, named: Mapping[str, int] | None = None
) -> Condition:
    """The condition of prompts made of token ids that the decoder embeds itself.

    embeddings `[tokens, width]`: of all ids. prefix: the longest prompt. tokenizer: a `tokenizer.json`, and `named`
    the ids by name that it must have.
    """
    _check_tokenizer(tokenizer, len(embeddings), named or {})
    spec = ConditionSpec(kind="tokens", prefix=prefix, layout=layout)
    return Condition(spec, token_graph(embeddings), tokenizer.read_bytes())


def _check_tokenizer(path: Path, rows: int, named: Mapping[str, int]) -> None:
    """Refuse a tokenizer that cannot be read, gives ids that the model does not embed, or other ids than `named`."""
    try:
        tokens = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path}: expected a tokenizer in JSON, found {str(error)[:100]}") from error
    cure = "give the model's own tokenizer"
    name, highest = max(tokens.items(), key=lambda item: item[1])
    if highest >= rows:
        raise CheckpointError(f"{path}: token {name!r} has id {highest}, but the model embeds {rows} tokens; {cure}")
    for name, wanted in named.items():
        if tokens.get(name) != wanted:
            found = f"id {tokens[name]}" if name in tokens else "no id"
            raise CheckpointError(f"{path}: token {name!r} has {found}, but the model's is {wanted}; {cure}")


class TokenCondition(nn.Module):
    """Token ids of both rows of a prompt, `[rows, tokens]` and `[rows, uncond_tokens]`, to their embeddings."""

    def __init__(self, embeddings: Tensor) -> None:
        super().__init__()
        self.table = nn.Embedding(len(embeddings), embeddings.shape[1], _weight=embeddings, _freeze=True)

    def forward(self, token_ids: Tensor, uncond_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(token_ids), self.table(uncond_ids)


def token_graph(embeddings: Tensor) -> Graph:
    """The graph `condition` of kind `tokens`; `embeddings [vocabulary, width]`."""
    vocabulary, width = embeddings.shape
    generator = np.random.default_rng(0)
    axes = {"token_ids": ("rows", "tokens"), "uncond_ids": ("rows", "uncond_tokens")}
    inputs = tuple(Value(name, shape, "int64") for name, shape in axes.items())
    outputs = (
        Value("prefix_embeds", ("rows", "tokens", width)),
        Value("uncond_embeds", ("rows", "uncond_tokens", width)),
    )
    cases: list[Arrays] = [
        {name: generator.integers(vocabulary, size=(rows, length)) for name, length in zip(axes, lengths, strict=True)}
        for rows, lengths in ((2, (5, 3)), (1, (7, 7)))
    ]

    def write(ops: Ops) -> None:
        for source, result in zip(inputs, outputs, strict=True):
            ops.op("Gather", ops.weight("table.weight", embeddings), source.name, name=result.name)

    return Graph("condition", TokenCondition(embeddings), inputs, outputs, plain_cases(cases), write)


def _decoding_defaults(drafter: bool, neighbours: int) -> DecodingDefaults:
    """The papers' settings, as far as the neighbour table reaches; plain decoding without a drafter."""
    if not drafter:
        return DecodingDefaults(method="ar")
    return DecodingDefaults(
        method="lantern",
        methods=(
            Eagle(tree="dynamic-59"),
            Lantern(tree="dynamic-59", neighbors=min(1000, neighbours), delta=0.2),
            LanternPlusPlus(tree="balanced-25", neighbors=min(10, neighbours), lambda_=2.0),
        ),
    )


def vq_graphs(tokenizer: LlamaGenVQ, grid: int) -> list[Graph]:
    """The graphs `vq_decoder` and `vq_encoder` for a grid of codes."""
    config = tokenizer.config
    cells, pixels = grid * grid, grid * config.scale
    generator = np.random.default_rng(0)
    counts = (2, 1) if pixels <= _LARGE_PICTURE else (1,)
    codes = [{"codes": generator.integers(config.codes, size=(images, cells))} for images in counts]
    image = Value("images", ("images", 3, pixels, pixels))
    pictures: list[Arrays] = [
        {"images": generator.uniform(-1, 1, (images, 3, pixels, pixels)).astype(np.float32)} for images in counts
    ]
    return [
        Graph(
            "vq_decoder",
            VQDecoder(tokenizer, grid),
            (Value("codes", ("images", cells), "int64"),),
            (image,),
            plain_cases(codes),
        ),
        Graph(
            "vq_encoder",
            VQEncoder(tokenizer),
            (image,),
            (Value("codes", ("images", cells), "int64"), Value("pre_quant", ("images", config.code_width, grid, grid))),
            plain_cases(pictures),
        ),
    ]


def _source(role: str, path: Path, origins: Mapping[Path, str]) -> Source:
    """A checkpoint file for the bundle's provenance; `origins` tells of it or its folder where it was fetched from."""
    return Source(
        role=role, name=path.name, sha256=file_sha256(path), origin=origins.get(path, origins.get(path.parent))
    )


def plain_cases(inputs: list[Arrays]) -> tuple[Case, ...]:
    """Checks of a graph that is no decoder; the first axis of the first input counts rows."""
    return tuple(Case(f"{len(next(iter(arrays.values())))} rows", arrays) for arrays in inputs)


def _decoder_spec(sizes: DecoderConfig) -> DecoderSpec:
    """A target's sizes in the manifest."""
    return DecoderSpec(
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab_size,
        max_positions=sizes.positions,
    )


def _drafter_spec(drafting: Drafting) -> DrafterSpec:
    sizes = drafting.drafter.config
    return DrafterSpec(
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab_size,
        masks_prefix=drafting.masks_prefix,
        code_offset=drafting.code_offset,
    )
