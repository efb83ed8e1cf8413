"""Does the loss of a drafter matter, and how much data? Drafters of one scenes target, measured by decoding.

    python benchmarks/drafters.py --work work/scenes                     # the three losses, and less data
    python benchmarks/drafters.py --work work/scenes --losses kl --pictures 512,1024
    python benchmarks/drafters.py --smoke                                # tiny: does it still run?

`--work` is a folder of the scenes recipe, with what `samples` drew. Every drafter is trained by `train-drafter`'s own
fit, with as many steps, and decodes the same prompts with the same seeds, one image at a time. Printed, and kept in
`WORK/drafters/figures.json`: overlap and first choice on held-out pictures, and by method tokens per forward pass,
how they differ from those with the first drafter, and the share of steps that accept a draft, with 95 % intervals over
images. Fits go on where they were stopped; drafters that have been measured are not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lantern_rt import LanternError, Pipeline, RequestError
from lantern_rt.compare.turns import PLAIN, Subjects, parse_contenders, take_turns
from lantern_rt.train.drafter.borrowed import read_borrowed
from lantern_rt.train.drafter.figures import default_relaxation
from lantern_rt.train.drafter.fit import Fit, Options
from lantern_rt.train.drafter.losses import LOSSES, Loss
from lantern_rt.train.drafter.shards import Data
from lantern_rt.train.scenes.bundle import TREE, write_scenes_bundle
from lantern_rt.train.scenes.drafter import undrafted_bundle, write_samples
from lantern_rt.train.scenes.evaluate import draw_prompts
from lantern_rt.train.scenes.restore import restore_work

METHODS = f"eagle:tree=chain-5,eagle:tree={TREE},eagle:tree=dynamic-16-6-4,lantern++:tree={TREE},lantern:tree={TREE}"
PROMPTS_SEED = 940_000  # of scenes that nothing else uses
SMOKE = {"losses": "kl,tv-neighbors", "pictures": "1", "steps": 2, "batch": 1, "images": 2}
SMOKE |= {"methods": "eagle:tree=chain-3,lantern++:tree=chain-3"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("work/scenes"), help="folder of the scenes recipe")
    parser.add_argument("--losses", default=",".join(LOSSES), help=f"with all pictures [default: {','.join(LOSSES)}]")
    parser.add_argument("--pictures", default="256,1024", help="other numbers, with the first loss [default: 256,1024]")
    parser.add_argument("--steps", type=int, default=2000, help="of every fit [default: 2000]")
    parser.add_argument("--batch", type=int, default=12, help="pictures a step [default: 12]")
    parser.add_argument("--images", type=int, default=32, help="of every method [default: 32]")
    parser.add_argument("--methods", default=METHODS, help="as in `lantern-rt bench`")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as folder:
        if asked.smoke:
            vars(asked).update(SMOKE, work=Path(folder) / "work")
            restore_work("scenes", asked.work)
            write_samples(asked.work, 2, shard=2, threads=asked.threads)
        compare(asked)


def compare(asked: argparse.Namespace) -> None:
    """Fit, measure and report one drafter after the other."""
    losses = asked.losses.split(",")
    if unknown := [loss for loss in losses if loss not in LOSSES]:
        raise RequestError(f"losses: found {unknown[0]!r}, expected some of {','.join(LOSSES)}")
    drafters = [(loss, None) for loss in losses]
    drafters += [(losses[0], int(count)) for count in asked.pictures.split(",") if count]
    kept = asked.work / "drafters" / "figures.json"
    measured: dict[str, Any] = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
    first: dict[str, Any] = {}
    for loss, pictures in drafters:
        name = f"{loss}, {pictures or 'all'} pictures, {asked.steps} steps of {asked.batch}"
        key = f"{name}; {asked.images} images, {asked.methods}"
        if key not in measured:
            folder = asked.work / "drafters" / f"{loss}-{pictures or 'all'}-{asked.steps}"
            measured[key] = {"held out": fitted(asked, folder, loss, pictures), **decoded(asked, folder)}
            kept.write_text(json.dumps(measured, indent=1) + "\n", "utf-8")
        first = first or measured[key]
        report(name, measured[key], first)


def fitted(asked: argparse.Namespace, folder: Path, loss: Loss, pictures: int | None) -> dict[str, float]:
    """Train a drafter, on the first so many of the pictures; its figures on those held out."""
    bundle = undrafted_bundle(asked.work)
    manifest, borrowed = bundle.manifest, read_borrowed(bundle)
    neighbors, lambda_ = default_relaxation(manifest)
    scale = manifest.sampling.cfg_scale
    options = Options(asked.steps, asked.batch, loss, cfg_scale=scale, neighbors=neighbors, lambda_=lambda_)
    data = Data(asked.work / "samples", borrowed.weights)
    fit = Fit(data, borrowed, manifest, options, folder / "drafter", force=True)
    fit.training = fit.training[:pictures]
    return fit.run(lambda what, done, total: None, lambda line: print(f"  {line}", flush=True))


def decoded(asked: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """By method, of every image: tokens per forward pass, steps that accept a draft, total variation a token."""
    for role in ("vq.pt", "target.pt"):
        if not (folder / role).exists():
            (folder / role).symlink_to((asked.work / role).resolve())
    bundle = write_scenes_bundle(folder, folder / "bundle", True, lambda what, done, total: None)
    subjects = Subjects("prompts", draw_prompts(asked.images, PROMPTS_SEED)[1])
    with Pipeline.from_bundle(bundle, threads=asked.threads) as pipeline:
        contenders = [one for one in parse_contenders(asked.methods, {}, pipeline.bundle) if one.label != PLAIN]
        requests = [subjects.request(i, 1) for i in range(asked.images)]
        turns = list(take_turns(pipeline, contenders, requests, paint=False, score=False))
    found: dict[str, dict[str, list[float]]] = {"tokens": {}, "accepting": {}, "TVD": {}}
    for contender, runs in zip(contenders, zip(*turns, strict=True), strict=True):
        steps = [np.array(run.statistics.per_image[0].codes_per_step) for run in runs]
        found["tokens"][contender.label] = [run.statistics.tokens_per_forward_pass for run in runs]
        found["accepting"][contender.label] = [float((codes > 1).mean()) for codes in steps]
        found["TVD"][contender.label] = [run.tvd_per_token for run in runs]
    return found


def report(name: str, own: dict[str, Any], first: dict[str, Any]) -> None:
    """Print what was found; first: of the drafter that others are compared with."""
    held_out = ", ".join(f"{figure} {own['held out'][figure]:.3f}" for figure in ("overlap", "top-1"))
    print(f"{name}: {held_out}", flush=True)
    for method, tokens in own["tokens"].items():
        change, accepting = np.subtract(tokens, first["tokens"][method]), own["accepting"][method]
        print(
            f"  {method:40} {np.mean(tokens):.2f} +- {half(tokens):.2f} tokens a pass, "
            f"{change.mean():+.2f} +- {half(change):.2f} against the first; "
            f"{np.mean(accepting):.3f} +- {half(accepting):.3f} of steps accept, TVD {np.mean(own['TVD'][method]):.3f}",
            flush=True,
        )


def half(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Half the 95 % interval of a mean."""
    return 1.96 * float(np.std(values, ddof=1)) / len(values) ** 0.5


if __name__ == "__main__":
    try:
        main()
    except LanternError as error:
        sys.exit(f"drafters.py: {error}")
