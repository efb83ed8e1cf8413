"""From LlamaGen's published files to a bundle: transformer, image tokenizer, EAGLE drafter and text encoder if given.

Does not know file layouts (`llamagen_gpt.py`, `llamagen_vq.py`, `eagle.py`, `text_encoder.py`) nor how
graphs and bundles are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from ...bundle.manifest import ConditionSpec
from ...errors import CheckpointError, RequestError
from ...methods import Sampling
from ..graph.graphs import Arrays, Graph
from ..graph.onnx_ops import Value
from ..graph.text_condition import text_condition_graph
from ..models.eagle import read_drafter
from ..models.llamagen_gpt import CaptionCondition, LlamaGen, read_llamagen
from ..models.llamagen_vq import read_vq
from ..models.text_encoder import read_text_encoder
from ..writer import check_output, write_bundle
from .common import Condition, Drafting, Model, export_model, plain_cases


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
    image = read_vq(vq)
    if image.config.codes != sizes.vocab_size:
        raise CheckpointError(f"{vq}: has {image.config.codes} codes, but the transformer has {sizes.vocab_size}")
    draft = None if drafter is None else read_drafter(drafter, transformer.decoder)
    sources = [*transformer.files, ("vq", vq), *(draft.files if draft else ())]
    if text_encoder is None:
        condition = _condition(transformer)
    elif isinstance(transformer.condition, CaptionCondition):
        say("reading the text encoder")
        text = read_text_encoder(text_encoder, transformer.condition.first.shape[1])
        sources += text.files
        spec = ConditionSpec(kind="text", prefix=sizes.prefix, cleaning="llamagen")
        condition = Condition(spec, text_condition_graph(text.encoder, transformer.condition), text.tokenizer)
    else:
        raise CheckpointError(
            f"{target}: is class-conditional and takes no text; leave --text-encoder out, or give a text model"
        )
    classes = transformer.classes is not None
    parts = Model(
        family="llamagen",
        decoder=transformer.decoder,
        code_embeddings=transformer.code_embeddings,
        condition=condition,
        vq=image,
        sampling=Sampling(cfg_scale=4.0 if classes else 7.5, top_k=0 if classes else 1000),
        sources=sources,
        drafting=None if draft is None else Drafting(draft.drafter, masks_prefix=False),
    )
    return export_model(parts, output, name=name, force=force, origins=origins, progress=progress, write=write)


def _condition(transformer: LlamaGen) -> Condition:
    """Class ids, or text embeddings."""
    sizes = transformer.decoder.config
    generator = np.random.default_rng(0)
    inputs: tuple[Value, ...]
    cases: list[Arrays]
    if transformer.classes is not None:
        inputs = (Value("class_ids", ("rows",), "int64"),)
        cases = [{"class_ids": generator.integers(transformer.classes, size=rows)} for rows in (3, 1)]
    else:
        width = transformer.caption_dim or 0
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
    outputs = tuple(
        Value(name, ("rows", sizes.prefix, sizes.hidden_size)) for name in ("prefix_embeds", "uncond_embeds")
    )
    graph = Graph("condition", transformer.condition, inputs, outputs, plain_cases(cases))
    spec = ConditionSpec(
        kind="embeddings" if transformer.classes is None else "class",
        prefix=sizes.prefix,
        classes=transformer.classes,
        caption_dim=transformer.caption_dim,
    )
    return Condition(spec, graph)
