"""The `export` command: converts a checkpoint to a bundle."""

from __future__ import annotations

import re
import time
from os.path import exists
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bundle.hub import HUB, REPOSITORY, find_hub_cache
from ..compare.prompts import read_prompts
from ..engines.host import EXPORT_BYTES, available_memory, check_space
from ..errors import CheckpointError
from ..export.registry import (
    FAMILIES,
    check_family_options,
    detect_model_family,
    load_model_family,
    read_family_checkpoints,
)
from ..export.space import ExportSizes, estimate_export_sizes
from ..inputs import require_library
from ..memory import PeakMemoryMonitor
from ..model_names import find_model_name, is_checkpoint_file
from ..published import PublishedModel, find_published_model, is_published
from .console import format_bytes, print_stderr, print_text, show_progress
from .options import ForceOption

EXAMPLES = r"""
lantern-rt export llamagen-c2i-b-256 --precision fp32 --output bundles/llamagen-b
lantern-rt export --target c2i_B_256.pt --vq vq_ds16_c2i.pt --grid 16 --output bundles/llamagen-b
lantern-rt export --target hf:jadohu/LlamaGen-T2I --drafter hf:jadohu/llamagen_drafter \
    --vq hf:peizesun/llamagen_t2i/vq_ds16_t2i.pt --text-encoder hf:google/flan-t5-xl --output bundles/text
lantern-rt export --family anole --target Anole-7b-v0.1-hf/ --vq chameleon-vqgan/ \
    --drafter anole-drafter/ --output bundles/anole
lantern-rt export --family lumina --target Lumina-mGPT-7B-768/ --vq chameleon-vqgan/ --grid 48 --output bundles/lumina
lantern-rt export --family lumina2 --target Lumina-mGPT-2.0/ --vq movqgan_270M.ckpt --output bundles/lumina2
lantern-rt export --family glm_image --target GLM-Image/ --output bundles/glm-image
lantern-rt export --target hf:deepseek-ai/Janus-Pro-1B --output bundles/janus
lantern-rt export --family emu3 --target hf:BAAI/Emu3-Gen-hf --output bundles/emu3
lantern-rt export --family simplear --target SimpleAR-0.5B-RL/ --vq Cosmos-1.0-Tokenizer-DV8x16x16/ \
    --output bundles/simplear
"""

OutputOption = Annotated[Path, typer.Option(help="Bundle folder to write.")]
NameArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="Checkpoint: a file, a folder or hf:owner/name; or a published model, as `lantern-rt models` lists them, "
        "whose settings other options replace.",
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(help="Target checkpoint, as an alternative: a file or folder, or hf:owner/name[/file][@revision]."),
]
VqOption = Annotated[
    str | None,
    typer.Option(
        help="Checkpoint of the image tokenizer: a file, for some families a folder, or "
        "hf:owner/name[/file][@revision]."
    ),
]
DrafterOption = Annotated[
    str | None,
    typer.Option(help="Folder of an EAGLE drafter in LANTERN's layout, or hf:owner/name[@revision]. [default: none]"),
]
TextEncoderOption = Annotated[
    str | None,
    typer.Option(
        help="Folder of the model's text encoder, or hf:owner/name, such as hf:google/flan-t5-xl (LlamaGen; without it "
        "the bundle takes embeddings) or hf:Qwen/Qwen3-1.7B (GEAR-T2I)."
    ),
]
ConfigOption = Annotated[
    str | None,
    typer.Option(
        help='JSON file of settings that the weights do not contain, such as {"n_head": 12, "block_size": 256}.'
    ),
]
GridOption = Annotated[
    int | None, typer.Option(help="Number of tokens per side of an image, if no file contains this number.")
]
RolesOption = Annotated[
    str | None,
    typer.Option(help="Roles in Janus's prompt; User,Assistant for Janus-1.3B. [default: <|User|>,<|Assistant|>]"),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(help="Weights to read from LlamaGen's files with several: model or ema. [default: model]"),
]
LoraOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FOLDER[:SCALE]",
        help="LoRA adapter of PEFT to merge into the target; may be given several times, to merge in order.",
    ),
]
FamilyOption = Annotated[
    str | None,
    typer.Option(
        help=f"Family: {', '.join(FAMILIES[:-1])} or {FAMILIES[-1]}. "
        f"[default: that of the published model or of config.json, or {FAMILIES[0]}]"
    ),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        help="Text file with a prompt per line, for `bench`, `eval` and `push`. [default: twelve captions, if the "
        "model takes prompts]"
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        help="Storage of the weights: fp32, fp16, bf16-safe, int8 (the fastest, only for CPUs), int8-weights, "
        "int4-weights, or auto (the fastest on this processor). [default: as --compute]"
    ),
]
VqPrecisionOption = Annotated[
    str, typer.Option(help="Precision of the image decoder: fp32, fp16 (for GPUs) or int8 (for CPUs).")
]
ComputeOption = Annotated[
    str, typer.Option(help="Compute precision of target and drafter: float32, or for GPUs float16 or bfloat16.")
]


def export(
    output: OutputOption,
    name: NameArgument = None,
    target: TargetOption = None,
    vq: VqOption = None,
    drafter: DrafterOption = None,
    text_encoder: TextEncoderOption = None,
    config: ConfigOption = None,
    grid: GridOption = None,
    roles: RolesOption = None,
    weights: WeightsOption = None,
    lora: LoraOption = None,
    family: FamilyOption = None,
    prompts: PromptsOption = None,
    precision: PrecisionOption = None,
    vq_precision: VqPrecisionOption = "fp32",
    compute: ComputeOption = "float32",
    force: ForceOption = False,
) -> None:
    """Convert a checkpoint to a bundle, and compare every graph with the checkpoint. Needs lantern-rt[cpu,export]."""
    if (name is None) == (target is None):
        actual = "neither" if name is None else "both"
        raise CheckpointError(field="target", found=actual, expected="the name of a published model or --target")
    model, target = _find_model_or_target(name) if name else (None, target)
    options: dict[str, Any] = {
        "target": target,
        "vq": vq,
        "drafter": drafter,
        "text_encoder": text_encoder,
        "config": config,
        "grid": grid,
        "roles": roles,
        "weights": weights,
        "lora": lora or None,
    }
    if model is not None:
        options |= {key: value for key, value in model.export_options.items() if options[key] is None}
        family = family or model.family
    for library in ("torch", "onnx", "onnxruntime"):
        require_library(library, "export", "cpu,export")
    with show_progress(announce_tasks=False) as progress:
        progress("loading PyTorch")
        from ..export.graph.precision import parse_precisions
        from ..export.prompts import add_prompts
        from ..export.writer import check_output_folder, export_model

        check_output_folder(output, force)  # before downloads
        family = family or detect_model_family(options["target"])
        _check_options(family, options)
    family = family or FAMILIES[0]
    precisions = parse_precisions(precision, compute, vq_precision)
    fastest = parse_precisions("auto", compute="float32").target
    if precision == "auto":
        print_stderr(f"precision: {fastest}, the fastest on this processor")
    texts = [] if prompts is None else [prompt for _, prompt in read_prompts(prompts)]
    _check_space_for_download(output, estimate_export_sizes(load_model_family(family), options, precisions.target))
    start = time.perf_counter()
    with PeakMemoryMonitor() as peak, show_progress() as progress:
        loaded = read_family_checkpoints(family, options, progress, model.cfg_scale if model else None)
        loaded = add_prompts(loaded, texts)
        export_model(loaded, output, precisions=precisions, force=force, progress=progress)
    _print_export_costs(output, time.perf_counter() - start, peak.bytes)
    if precision is None and precisions.target == "fp32" != fastest:
        print_stderr(f"precision: fp32; on this processor, `--precision {fastest}` is smaller and faster")
    if loaded.manifest_fields["order"] is None:
        takes_embeddings = loaded.manifest_fields["condition"].kind == "embeddings"
        options = "--write-presets" + " --prompts FILE.npz" * takes_embeddings
        print_stderr(f"quality: strict; for balanced and fast, run `lantern-rt eval {output} {options}`")
    print_text(output)


def _find_model_or_target(name: str) -> tuple[PublishedModel | None, str | None]:
    """Return the published model that a name means, or the target that it means: a path or hub reference."""
    known = find_model_name(name)
    if is_published(known):
        return find_published_model(known), None
    if exists(name) or name.startswith(HUB) or is_checkpoint_file(Path(name)):
        return None, name
    if re.fullmatch(REPOSITORY, name):
        return None, f"{HUB}{name}"
    return find_published_model(name), None  # raises an error, which has the names that are alike


def _check_options(family: str | None, options: dict[str, Any]) -> None:
    """Check the options of a family; None: the default family, which an error calls a guess."""
    try:
        check_family_options(family or FAMILIES[0], options)
    except CheckpointError as error:
        if family is None:
            error.remedy = "; ".join(filter(None, [error.remedy, f"{FAMILIES[0]} is a guess: --family names another"]))
        raise


def _check_space_for_download(output: Path, sizes: ExportSizes) -> None:
    """Check that there is enough space for a download and its bundle, and print their sizes."""
    if sizes.download_bytes:
        check_space(
            min(EXPORT_BYTES, sizes.bundle_bytes),
            [(output, sizes.bundle_bytes), (find_hub_cache(), sizes.download_bytes)],
        )
        free = format_bytes(available_memory())
        needed = f"at least {format_bytes(sizes.bundle_bytes)} on disk, and as much memory to run ({free} free)"
        print_stderr(f"downloads {format_bytes(sizes.download_bytes)} from the hub; the bundle needs {needed}")


def _print_export_costs(output: Path, seconds: float, peak_memory: int | None) -> None:
    """Print the size of the bundle, the time of the export, and its peak memory if that was measured."""
    size = sum(file.stat().st_size for file in output.iterdir())
    memory = "" if peak_memory is None else f", peak memory {peak_memory / 1e9:.2f} GB without mapped files"
    print_stderr(f"wrote {format_bytes(size)} in {seconds:.0f} s{memory}")
