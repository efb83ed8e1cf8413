"""Command line `python -m recipes.scenes`, with one command for each step that makes the default bundle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from lantern_rt.errors import LanternError

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Work = Annotated[Path, typer.Option(help="Folder of checkpoints and codes; kept between calls.")]
Minutes = Annotated[float, typer.Option(help="How long to train.")]
MinutesInAll = Annotated[float, typer.Option(help="How long to train in all, earlier calls counted in.")]
Threads = Annotated[int, typer.Option(help="Processor threads.")]
Device = Annotated[str, typer.Option(help="Where to train: cpu, cuda, cuda:1.")]
Batch = Annotated[int, typer.Option(help="Scenes a step.")]
DEFAULT_WORK = Path("work/scenes")


@app.command()
def vq(
    work: Work = DEFAULT_WORK,
    minutes: MinutesInAll = 15,
    threads: Threads = 2,
    batch: Batch = 16,
    device: Device = "cpu",
    size: Annotated[
        str | None, typer.Option(help="128 or 256 pixels a side. [default: that of the work folder, or 256]")
    ] = None,
) -> None:
    """Train the VQ tokenizer, or continue its training."""
    from .vq import find_vq_config, train_vq

    torch.set_num_threads(threads)
    config = None if size is None else find_vq_config(size)
    train_vq(work, minutes, batch=batch, device=device, config=config)


@app.command()
def sharpen(
    work: Work = DEFAULT_WORK,
    minutes: MinutesInAll = 15,
    threads: Threads = 2,
    batch: Batch = 16,
    device: Device = "cpu",
) -> None:
    """Train the VQ tokenizer's decoder further, against a critic; the encoder and the codebook do not change."""
    from .sharpen import sharpen_vq_decoder

    torch.set_num_threads(threads)
    sharpen_vq_decoder(work, minutes, batch, device)


@app.command()
def target(
    work: Work = DEFAULT_WORK,
    minutes: MinutesInAll = 150,
    threads: Threads = 2,
    cooldown: Annotated[float, typer.Option(help="Share of the time over which the rate falls to zero.")] = 0.3,
    batch: Batch = 16,
    compiled: Annotated[bool, typer.Option("--compile", help="Use torch.compile; needs a C++ compiler.")] = False,
    device: Device = "cpu",
    size: Annotated[
        str | None,
        typer.Option(help="default or llamagen-b. [default: that of the target in the work folder, or default]"),
    ] = None,
) -> None:
    """Train the target, or continue its training."""
    from .model import find_target_config
    from .target import train_target

    torch.set_num_threads(threads)
    config = None if size is None else find_target_config(size)
    train_target(work, minutes, cooldown, batch, compiled=compiled, device=device, target_config=config)


@app.command()
def distil(
    work: Work = DEFAULT_WORK,
    minutes: MinutesInAll = 90,
    threads: Threads = 2,
    batch: Batch = 8,
    device: Device = "cpu",
) -> None:
    """Distil guidance into the target, so that images need no guidance any more, or continue this training."""
    from .distil import distil_guidance

    torch.set_num_threads(threads)
    distil_guidance(work, minutes, batch, device=device)


@app.command()
def samples(
    work: Work = DEFAULT_WORK,
    count: Annotated[int, typer.Option(help="Images.")] = 4096,
    threads: Threads = 2,
    provider: Annotated[str, typer.Option(help="What ONNX Runtime runs on: cpu, cuda, ...")] = "cpu",
) -> None:
    """Generate the drafter's training images with the target; images that exist are kept."""
    from .drafter import write_samples

    write_samples(work, count, provider=provider, threads=threads)


@app.command()
def drafter(
    work: Work = DEFAULT_WORK,
    steps: Annotated[int, typer.Option(help="Updates of the weights.")] = 4000,
    threads: Threads = 2,
    batch: Batch = 12,
    device: Device = "cpu",
) -> None:
    """Train the drafter on the images of the command `samples`, or continue its training."""
    from .drafter import train_drafter

    torch.set_num_threads(threads)
    train_drafter(work, steps, batch, device)


@app.command()
def judge(
    work: Work = DEFAULT_WORK,
    minutes: Minutes = 8,
    threads: Threads = 2,
    new: Annotated[int | None, typer.Option(help="Seed of another judge with new weights, for `reinforce`.")] = None,
) -> None:
    """Train the judge, a network that checks images against prompts. `lantern-rt eval --agreement` can use its file."""
    from .judge import train_judge

    torch.set_num_threads(threads)
    train_judge(work, minutes, new_seed=new)


@app.command()
def reinforce(
    work: Work = DEFAULT_WORK,
    minutes: Minutes = 7,
    threads: Threads = 2,
    images: Annotated[int, typer.Option(help="Images a step.")] = 1024,
    device: Device = "cpu",
) -> None:
    """Train the distilled target further, by the marks that judges give to the images that it draws."""
    from .reinforce import reinforce_target

    torch.set_num_threads(threads)
    reinforce_target(work, minutes, images, device=device)


def _print_stage(stage: str, done: int, total: int) -> None:
    """Print a line when a stage begins."""
    if not done:
        print(stage, flush=True)


@app.command()
def bundle(
    output: Annotated[Path, typer.Argument(help="Folder to write.")] = Path("lantern_rt/bundles/scenes"),
    work: Work = DEFAULT_WORK,
    force: Annotated[bool, typer.Option("--force", help="Replace the bundle that is there.")] = False,
    compute: Annotated[str, typer.Option(help="What it computes in: float32, or float16 for GPUs.")] = "float32",
    precision: Annotated[
        str | None, typer.Option(help="Round weights further, such as int8-weights. [default: float16, without loss]")
    ] = None,
    vq_precision: Annotated[str, typer.Option(help="What the image decoder multiplies: fp32, fp16 or int8.")] = "fp32",
) -> None:
    """Write the trained models of the work folder as a bundle."""
    from .bundle import write_scenes_bundle

    write_scenes_bundle(work, output, force, _print_stage, compute, precision, vq_precision=vq_precision)


@app.command()
def restore(
    bundle: Annotated[str, typer.Option(help="Scenes bundle: a folder or a name.")] = "scenes",
    work: Work = DEFAULT_WORK,
    only_vq: Annotated[bool, typer.Option("--only-vq", help="The tokenizer only, to train another target.")] = False,
) -> None:
    """Write a work folder from a bundle, so that training can continue without the old checkpoints."""
    from .restore import restore_work_folder

    restore_work_folder(bundle, work, only_vq)


@app.command()
def evaluate(
    output: Annotated[Path, typer.Argument(help="Folder for the report and contact sheets.")],
    bundle: Annotated[Path, typer.Option(help="Bundle to evaluate.")] = Path("lantern_rt/bundles/scenes"),
    work: Work = DEFAULT_WORK,
    count: Annotated[int, typer.Option(help="Prompts.")] = 200,
    method: Annotated[list[str] | None, typer.Option(help="Only these methods; may be repeated.")] = None,
    typed: Annotated[bool, typer.Option("--typed", help="Captions as people type them, not complete ones.")] = False,
    temperature: Annotated[float | None, typer.Option(help="[default: the bundle's]")] = None,
    top_p: Annotated[float | None, typer.Option(help="[default: the bundle's]")] = None,
    threads: Threads = 2,
) -> None:
    """Generate images of unseen prompts with every method, and measure with the judge how well they agree."""
    from .evaluate import METHODS, evaluate_bundle

    options = {"temperature": temperature, "top_p": top_p}
    evaluate_bundle(bundle, work, output, count, method or METHODS, threads=threads, typed=typed, **options)


@app.command()
def edits(
    bundle: Annotated[Path, typer.Option(help="Bundle to evaluate.")] = Path("lantern_rt/bundles/scenes"),
    work: Work = DEFAULT_WORK,
    count: Annotated[int, typer.Option(help="Edits.")] = 400,
    threads: Threads = 2,
) -> None:
    """Edit parts of images, and measure with the judge how well the parts agree with their prompts."""
    from .edits import evaluate_edits

    evaluate_edits(bundle, work, count, threads)


@app.command()
def render(
    output: Annotated[Path, typer.Argument(help="PNG to write.")],
    count: Annotated[int, typer.Option(help="Scenes.")] = 48,
    seed: Annotated[int, typer.Option(help="Seed of the scenes.")] = 0,
) -> None:
    """Render training scenes into one PNG file, eight in a row."""
    from .data import render_images
    from .evaluate import make_contact_sheet

    pictures = render_images(count, seed)
    make_contact_sheet([pictures], 8, num_rows=-(-count // 8)).save(output)


if __name__ == "__main__":
    try:
        app()
    except LanternError as error:
        sys.exit(f"scenes: {error}")
