"""The `export` command."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import CheckpointError, EngineError
from .console import print_text, progress, say
from .families import FAMILIES, Checkpoints, read_family
from .memory import PeakMemory
from .options import Force

if TYPE_CHECKING:
    from ..export.writer import Model

EXAMPLES = r"""
lantern-rt export --family llamagen --target c2i_B_256.pt --grid 16 \
    --vq vq_ds16_c2i.pt --output bundles/llamagen-b
lantern-rt export --family llamagen --target t2i_XL_256.pt --grid 16 \
    --vq vq_ds16_t2i.pt --drafter drafter-xl/ --output bundles/llamagen-xl --force
lantern-rt export --family llamagen --target hf:jadohu/LlamaGen-T2I --drafter hf:jadohu/llamagen_drafter \
    --vq hf:peizesun/llamagen_t2i/vq_ds16_t2i.pt --text-encoder hf:google/flan-t5-xl --output bundles/text
lantern-rt export --family anole --target Anole-7b-v0.1-hf/ --vq chameleon-vqgan/ \
    --drafter anole-drafter/ --output bundles/anole
lantern-rt export --family lumina --target Lumina-mGPT-7B-768/ --vq chameleon-vqgan/ --grid 48 --output bundles/lumina
lantern-rt export --family janus --target Janus-Pro-1B/ --output bundles/janus
lantern-rt export --family emu3 --target hf:BAAI/Emu3-Gen-hf --output bundles/emu3
"""


def export(
    given: Checkpoints,
    *,
    output: Annotated[Path, typer.Option(help="Bundle folder to write.")],
    family: Annotated[str, typer.Option(help="Model family: llamagen, anole, lumina, janus or emu3.")] = "llamagen",
    name: Annotated[str | None, typer.Option(help="The bundle's name. [default: the output folder's]")] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="How weights are stored: fp32, fp16, bf16-safe, int8 (the fastest, for CPUs only), int8-weights, "
            "int4-weights, or auto: what is fastest on this processor. [default: fp32]"
        ),
    ] = None,
    drafter_precision: Annotated[
        str | None, typer.Option(help="The same for the drafter. [default: --precision]")
    ] = None,
    compute: Annotated[
        str, typer.Option(help="What target and drafter compute in: float32, or float16 for GPUs.")
    ] = "float32",
    force: Force = False,
) -> None:
    """Turn a checkpoint into a bundle, and check every graph against it. Needs lantern-rt[cpu,export]."""
    if family not in FAMILIES:
        raise CheckpointError(f"family: found {family!r}, expected {' or '.join(FAMILIES)}")
    if missing := [name for name in ("torch", "onnx", "onnxruntime") if importlib.util.find_spec(name) is None]:
        raise EngineError(
            f"export needs {' and '.join(missing)}, found none installed; run `pip install 'lantern-rt[cpu,export]'`"
        )
    given.check(family)
    with progress(lines=False) as show:
        show("loading PyTorch")
        from ..export.graph.precision import read_precisions
        from ..export.writer import check_output, export_model

    precisions = read_precisions(precision, drafter_precision, compute)
    if precision == "auto":
        say(f"precision: {precisions.target}, the fastest on this processor")
    check_output(output, force)  # before anything is fetched
    fetched, origins = given.fetched(family)
    start = time.perf_counter()
    with PeakMemory() as peak, progress() as show:
        found = read_family(family, fetched, show)
        say(_described(found))
        export_model(found, output, name=name, precisions=precisions, origins=origins, force=force, progress=show)
    size = sum(file.stat().st_size for file in output.iterdir())
    memory = "" if peak.bytes is None else f", at most {peak.bytes / 1e9:.2f} GB of memory besides mapped files"
    say(f"wrote {size / 1e9:.2f} GB in {time.perf_counter() - start:.0f} s{memory}")
    print_text(output)


def _described(model: Model) -> str:
    """What was found in the checkpoints, as a line."""
    fields = model.fields
    target, drafter, condition = fields["target"], fields["drafter"], fields["condition"]
    prompt = {
        "class": f"{condition.classes} classes",
        "embeddings": f"embeddings of texts, up to {condition.prefix} x {condition.caption_dim}",
        "text": f"texts of up to {condition.prefix} tokens",
        "tokens": f"texts of up to {condition.prefix} tokens",
    }[condition.kind]
    parts = [
        f"found {fields['family']}: {target.num_layers} layers",
        f"hidden size {target.hidden_size}",
        f"{target.hidden_size // target.head_dim} heads",
        f"grid {fields['grid_rows']} x {fields['grid_columns']}",
        f"{fields['image_width']} x {fields['image_height']} pixels",
        f"vocabulary {target.vocab_size}",
        f"condition: {prompt}",
        f"drafter: {drafter.num_layers} layers" if drafter else "no drafter",
    ]
    return ", ".join(parts)
