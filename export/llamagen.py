"""From LlamaGen's published files to a bundle: transformer, image tokenizer, EAGLE drafter and text encoder if given.

Does not know file layouts (`llamagen_gpt.py`, `llamagen_vq.py`, `eagle.py`, `text_encoder.py`) nor how
graphs and bundles are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..errors import CheckpointError, RequestError
from ..manifest import ConditionSpec, DrafterSpec, Provenance, SamplingDefaults
from .bundle_writer import check_output, write_bundle
from .eagle import DrafterFiles, drafter_graph, read_drafter
from .family import LICENCE, decoder_spec, decoding_defaults, plain_cases, source, vq_graphs
from .graphs import Arrays, Graph, target_graph
from .llamagen_gpt import CaptionCondition, LlamaGen, read_llamagen
from .llamagen_vq import read_vq
from .neighbours import neighbour_table
from .onnx_ops import Value
from .text_condition import text_condition_graph
from .text_encoder import read_text_encoder


def export_llamagen(
    target: Path,
    vq: Path,
    output: Path,
    *,
    drafter: Path | None = None,
    text_encoder: Path | None = None,
    model: str | None = None,
    config: Path | None = None,
    grid: int | None = None,
    name: str | None = None,
    force: bool = False,
    origins: Mapping[Path, str] | None = None,
    progress: Callable[[str], None] | None = None,
    write: Callable[..., Path] = write_bundle,
) -> Path:
    """Export a LlamaGen transformer with its VQ tokenizer; returns the bundle's folder.

    `target` is an official file, or a folder: LANTERN's layout, or shards. The transformer's heads come from `model`
    (a published name) or `config` (a JSON file of the model's arguments), `grid` is the number of code rows, 16 for
    256 pixels; a folder in LANTERN's layout tells all of these. `drafter` is a folder in LANTERN's layout.
    `text_encoder` is flan-t5-xl's folder; with it the bundle of a text model takes prompts, without it text
    embeddings. `origins` tells of files or folders where they were fetched from, for the manifest.
    `write` takes the bundle's parts as `write_bundle` does; give a partial one for other precisions.
    """
    say = progress or (lambda _: None)
    if grid is not None and not 1 <= grid <= 256:
        raise RequestError(f"grid is {grid}, expected 1 to 256 code rows")
    check_output(output, force)
    say("reading checkpoints")
    transformer = read_llamagen(target, model=model, config=config, grid=grid)
    sizes = transformer.decoder.config
    tokenizer = read_vq(vq)
    if tokenizer.config.codes != sizes.vocabulary:
        raise CheckpointError(f"{vq}: has {tokenizer.config.codes} codes, but the transformer has {sizes.vocabulary}")
    draft = None if drafter is None else read_drafter(drafter, transformer.decoder)
    condition = transformer.condition
    text = None
    if text_encoder is not None:
        if not isinstance(condition, CaptionCondition):
            raise CheckpointError(
                f"{target}: is class-conditional and takes no text; leave --text-encoder out, or give a text model"
            )
        say("reading the text encoder")
        text = read_text_encoder(text_encoder, condition.first.shape[1])
    say("sorting neighbours")
    neighbours = neighbour_table(tokenizer.codebook.numpy())

    sources = [*transformer.files, ("vq", vq)]
    if drafter is not None and draft is not None:
        sources += [("drafter", draft.weights), ("drafter_config", drafter / "config.json")]
    sources += [] if text is None else text.files
    pixels = sizes.grid * tokenizer.config.scale
    fields: dict[str, Any] = {
        "name": name or output.resolve().name,
        "family": "llamagen",
        "grid_rows": sizes.grid,
        "grid_columns": sizes.grid,
        "codebook_size": sizes.vocabulary,
        "image_height": pixels,
        "image_width": pixels,
        "target": decoder_spec(sizes),
        "drafter": None if draft is None else _drafter_spec(draft),
        "condition": ConditionSpec(
            kind="class" if transformer.classes else "embeddings" if text is None else "text",
            prefix=sizes.prefix,
            classes=transformer.classes,
            caption_width=transformer.caption_width if text is None else None,
            cleaning=None if text is None else "llamagen",
        ),
        "sampling": SamplingDefaults(
            cfg_scale=4.0 if transformer.classes else 7.5, top_k=0 if transformer.classes else 1000
        ),
        "decoding": decoding_defaults(draft is not None, neighbours.indices.shape[1]),
        "provenance": Provenance(
            exporter=f"lantern-rt {__version__}",
            sources=tuple(source(role, path, origins or {}) for role, path in sources),
            licence=LICENCE,
        ),
    }
    graphs = [target_graph(transformer.decoder, transformer.code_embeddings)]
    graphs += [] if draft is None else [drafter_graph(draft.drafter)]
    if text is not None and isinstance(condition, CaptionCondition):
        graphs += [text_condition_graph(text.encoder, condition)]
    else:
        graphs += [condition_graph(transformer)]
    graphs += vq_graphs(tokenizer, sizes.grid)
    return write(
        output,
        graphs=graphs,
        code_embeddings=transformer.code_embeddings.numpy(),
        fields=fields,
        neighbours=neighbours,
        files=None if text is None else {"tokenizer": ("tokenizer.json", text.tokenizer)},
        force=force,
        progress=progress,
    )


def condition_graph(transformer: LlamaGen) -> Graph:
    """The graph `condition` of either kind."""
    sizes = transformer.decoder.config
    generator = np.random.default_rng(0)
    inputs: tuple[Value, ...]
    cases: list[Arrays]
    if transformer.classes is not None:
        inputs = (Value("class_ids", ("rows",), "int64"),)
        cases = [{"class_ids": generator.integers(transformer.classes, size=rows)} for rows in (3, 1)]
    else:
        width = transformer.caption_width or 0
        inputs = (
            Value("caption_embeds", ("rows", sizes.prefix, width)),
            Value("caption_mask", ("rows", sizes.prefix), "int64"),
        )
        cases = [
            {
                "caption_embeds": generator.standard_normal((rows, sizes.prefix, width), dtype=np.float32),
                "caption_mask": np.sort(generator.integers(2, size=(rows, sizes.prefix))),
            }
            for rows in (3, 1)
        ]
    outputs = tuple(Value(name, ("rows", sizes.prefix, sizes.width)) for name in ("prefix_embeds", "uncond_embeds"))
    return Graph("condition", transformer.condition, inputs, outputs, plain_cases(cases))


def _drafter_spec(files: DrafterFiles) -> DrafterSpec:
    sizes = files.drafter.config
    return DrafterSpec(
        width=sizes.width,
        layers=sizes.layers,
        kv_heads=sizes.kv_heads,
        head_width=sizes.head_width,
        vocabulary=sizes.vocabulary,
        position_shift=-1,
        masks_prefix=False,
        prefix_token=0,
    )
