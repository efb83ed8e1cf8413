"""Train an EAGLE drafter for a bundle's target: first `data`, then `fit`. Needs lantern-rt[cpu,train]."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..checks import require_library, short, whole
from ..errors import RequestError
from .console import print_text, progress, say
from .options import ENGINE, BundleName, Embeddings, Force, Running

STEPS = {
    "data": """
lantern-rt train-drafter data bundles/llamagen-b --images 20000 --output drafter-data/
lantern-rt train-drafter data bundles/text --prompts captions.txt --images 50000 --states --output drafter-data/
lantern-rt train-drafter data scenes --pictures photos/ --output drafter-data/
""",
    "fit": """
lantern-rt train-drafter fit bundles/llamagen-b --data drafter-data/ --steps 20000 --output drafter/
lantern-rt train-drafter fit bundles/llamagen-b --data drafter-data/ --loss tv --device cuda --output drafter/
torchrun --nproc-per-node 4 -m lantern_rt train-drafter fit bundles/llamagen-b --data drafter-data/ --device cuda \\
    --batch 64 --output drafter/
""",
}


def data(
    bundle: BundleName,
    *,
    output: Annotated[Path, typer.Option(help="Folder of shards; one that was begun is gone on with.")],
    prompts: Annotated[Path | None, typer.Option(help="Text file, one prompt a line. [default: the bundle's]")] = None,
    embeddings: Embeddings = None,
    pictures: Annotated[
        Path | None,
        typer.Option(help="Folder of pictures, each with its caption (or class id) in NAME.txt, instead of drawing."),
    ] = None,
    images: Annotated[
        int, typer.Option(help="Pictures to draw, in whole shards: all prompts or classes over and over.")
    ] = 4096,
    shard: Annotated[int, typer.Option(help="Pictures a file.")] = 64,
    states: Annotated[
        bool, typer.Option("--states", help="Store hidden states: much disk, and `fit` need not compute them.")
    ] = False,
    running: Running,
) -> None:
    """Have the target draw pictures (or encode some that are there), to train on."""
    require_library("safetensors", "train-drafter data", "cpu,train")
    from ..compare.turns import subjects_of
    from ..train.drafter.data import drawing_jobs, encoding_jobs, estimated_bytes, write_shards

    whole("images", images, 1, 1, 100_000_000)
    whole("shard", shard, 1, 1, 1024)
    if pictures is not None and not (prompts is None and embeddings is None):
        raise RequestError("pictures: bring their own captions; leave --prompts and --embeddings out")
    opened = running.open_bundle(bundle)
    classes = opened.manifest.condition.classes  # all of them
    subjects = None if pictures is not None else subjects_of(opened, prompts, classes, embeddings)
    pipeline = running.load(opened)
    if pictures is not None:
        jobs = encoding_jobs(pipeline, pictures, shard)
    else:
        assert subjects is not None
        jobs = drawing_jobs(pipeline, subjects, images, shard)
    size = estimated_bytes(opened.manifest, shard * len(jobs), states)
    say(f"{len(jobs):,} shards of {shard} pictures, up to {size / 1e9:.2f} GB")
    with progress(lines=False) as show:
        for done in write_shards(pipeline, jobs, output, states, show):
            show("shards", done, len(jobs))
    print_text(output)


def fit(
    bundle: BundleName,
    *,
    data: Annotated[Path, typer.Option(help="Folder of shards that `train-drafter data` wrote with this bundle.")],
    output: Annotated[Path, typer.Option(help="Folder to write, for `export --drafter`.")],
    steps: Annotated[int, typer.Option(help="Updates of the weights.")] = 10_000,
    batch: Annotated[int, typer.Option(help="Pictures an update, of all workers together.")] = 12,
    loss: Annotated[
        str,
        typer.Option(help="kl, tv (one minus the acceptance rate), or tv-neighbors (that of relaxed acceptance)."),
    ] = "kl",
    depths: Annotated[int, typer.Option(help="How deep in a draft it learns to go on from its own predictions.")] = 3,
    cfg_scale: Annotated[
        float | None, typer.Option(help="Guidance of what it imitates; 1 is none. [default: the bundle's]")
    ] = None,
    caption_dropout: Annotated[float, typer.Option(help="Share of pictures learned without their caption.")] = 0.0,
    feature_weight: Annotated[float, typer.Option(help="Weight of the regression of hidden states.")] = 1.0,
    rate: Annotated[float, typer.Option(help="Learning rate of matrices (Muon).")] = 0.01,
    seed: Annotated[int, typer.Option(help="Of weights, order and noise.")] = 0,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, cuda:1.", rich_help_panel=ENGINE)] = "cpu",
    running: Running,
    force: Force = False,
) -> None:
    """Train a drafter on them, and write its folder for `export --drafter`.

    An interrupted fit is gone on with by the same command. Figures are said every minute.
    """
    for library in ("torch", "safetensors", "onnx"):
        require_library(library, "train-drafter fit", "cpu,train")
    with progress(lines=False) as show:
        show("loading PyTorch")
        from ..train.drafter.borrowed import read_borrowed
        from ..train.drafter.figures import default_relaxation
        from ..train.drafter.fit import Fit, Options
        from ..train.drafter.folder import check_folder
        from ..train.drafter.losses import LOSSES
        from ..train.drafter.parallel import check_device, joined_workers
        from ..train.drafter.shards import Data
    if loss not in LOSSES:
        raise RequestError(f"loss: found {short(loss)}, expected {', '.join(LOSSES)}")
    for name, value, low, high in (
        ("caption dropout", caption_dropout, 0.0, 1.0),
        ("feature weight", feature_weight, 0.0, 1e6),
        ("rate", rate, 0.0, 10.0),
        ("cfg scale", 1.0 if cfg_scale is None else cfg_scale, 0.0, 1000.0),
    ):
        if not low <= value <= high:
            raise RequestError(f"{name}: found {value}, expected {low} .. {high}")
    check_device(device)
    check_folder(output, force)
    opened = running.open_bundle(bundle)
    borrowed = read_borrowed(opened)
    shards = Data(data, borrowed.weights)
    neighbors, lambda_ = default_relaxation(opened.manifest)
    options = Options(
        whole("steps", steps, 1, 1, 10**9),
        whole("batch", batch, 1, 1, 10**6),
        loss,
        whole("depths", depths, 1, 1, 16),
        rate,
        feature_weight,
        caption_dropout=caption_dropout,
        cfg_scale=opened.manifest.sampling.cfg_scale if cfg_scale is None else cfg_scale,
        neighbors=neighbors,
        lambda_=lambda_,
        seed=whole("seed", seed, 0, 0, 2**31),
    )
    pipeline = None if shards.source.states else running.load(opened)
    with joined_workers(device) as (workers, own):
        fitting = Fit(
            shards,
            borrowed,
            opened.manifest,
            options,
            output,
            pipeline=pipeline,
            device=own,
            force=force,
            workers=workers,
        )
        if workers.first:
            with progress(lines=False) as show:
                found = fitting.run(show, say)
            say(", ".join(f"{name} {value:.3f}" for name, value in found.items()))
            print_text(output)
        else:
            fitting.run(lambda what, done, total: None, lambda line: None)
