"""A drafter for a model that is not `scenes`: train one of LlamaGen's shape, then its drafter by the commands; measure.

    python benchmarks/second_model.py                   # 38 minutes of training, then pictures and the drafter
    python benchmarks/second_model.py --smoke           # tiny: does it still run?

The model is class-conditional: 63 classes, a colour and a shape each, from scenes with one solid. Its transformer and
its decoder of pictures have LlamaGen's layers, names and files; only the codes are those of the `scenes` tokenizer.
What is trained is saved in `--work` (default `work/second-model`, which git ignores) every two minutes, and the same
command goes on from there; other sizes or minutes want another folder. Then, as a user would: `lantern-rt export`,
`train-drafter data`, `train-drafter fit`, `export --drafter` and `bench`; another `--loss` uses the same data.
Nothing is judged.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_rt import LanternError, Pipeline
from lantern_rt.cli.main import run_program
from lantern_rt.export.models.decoder import Decoder, DecoderConfig
from lantern_rt.export.models.llamagen_vq import CODEBOOK, LlamaGenVQ, VQConfig, VQDecoder
from lantern_rt.train.muon import Muon
from lantern_rt.train.precision import mixed_precision
from lantern_rt.train.scenes.checkpoints import load_checkpoint, save_checkpoint
from lantern_rt.train.scenes.data import render_scenes
from lantern_rt.train.scenes.evaluate import contact_sheet
from lantern_rt.train.scenes.restore import restore_work
from lantern_rt.train.scenes.stopwatch import Stopwatch
from lantern_rt.train.scenes.vocabulary import COLOURS, SHAPES, sample_scene
from lantern_rt.train.scenes.vq import CODE_DIM, GRID, ScenesVQ, load_vq, picture_loss, to_tensor

METHODS = "sjd:window=7,eagle:tree=chain-3,eagle:tree=dynamic-8-4-2,lantern:tree=chain-3,lantern++:tree=chain-3"
CLASSES = len(COLOURS) * len(SHAPES)
SIZE = DecoderConfig(256, 6, 4, 4, 768, vocab_size=0, grid=GRID, prefix=1)
SMOKE_SIZE = replace(SIZE, hidden_size=64, num_layers=2, intermediate_size=128)
SMOKE = {"minutes": 0.05, "decoder_minutes": 0.03, "scenes": 24, "images": 4, "steps": 2, "bench_images": 1}
OFFICIAL = {  # parts of names, and what LlamaGen's files have for them
    **{"classes.": "cls_embedding.embedding_table.", "codes.": "tok_embeddings.", "decoder.head.": "output."},
    **{"attention.qkv.": "attention.wqkv.", "attention.out.": "attention.wo.", "decoder.": ""},
    **{"ffn.gate.": "feed_forward.w1.", "ffn.up.": "feed_forward.w3.", "ffn.down.": "feed_forward.w2."},
}
BATCH, PICTURES, EVERY = 24, 8, 120.0  # scenes a step of each training; seconds between two saved states
OPTIONS: dict[str, tuple[float | str, str]] = {
    "minutes": (30.0, "to train the transformer"),
    "decoder-minutes": (8.0, "to train the decoder of pictures"),
    "scenes": (8000, "that the model learns from"),
    "images": (1024, "that the drafter learns from"),
    "steps": (2000, "to train the drafter"),
    "loss": ("kl", "of the drafter: kl, tv or tv-neighbors"),
    "bench-images": (16, "of every method"),
    "methods": (METHODS, "as in `lantern-rt bench`"),
    "threads": (2, "of training, drawing and measuring"),
}


class ClassModel(nn.Module):
    """LlamaGen's class-conditional transformer: one prefix row, then codes; class `CLASSES` stands for none."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.classes = nn.Embedding(CLASSES + 1, config.hidden_size)
        self.codes = nn.Embedding(config.vocab_size, config.hidden_size)
        self.decoder = Decoder(config)

    def forward(self, classes: Tensor, codes: Tensor) -> Tensor:
        """Mean nats of a code of `codes [rows, cells]`, given `classes [rows]`."""
        embeds = torch.cat([self.classes(classes)[:, None], self.codes(codes[:, :-1])], 1)
        logits = self.decoder.head(self.decoder.full(embeds))
        return F.cross_entropy(logits.flatten(0, 1), codes.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, (default, what) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{what} [default: {default}]")
    parser.add_argument("--work", type=Path, default=Path("work/second-model"))
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    if asked.smoke:
        vars(asked).update(SMOKE)
    torch.set_num_threads(asked.threads)
    work: Path = asked.work
    target, picture_decoder = write_checkpoints(asked, work)
    plain, drafted, data, drafter = (work / name for name in ("plain", f"drafted-{asked.loss}", "data", asked.loss))
    threads = ["--threads", asked.threads]
    exported = ["export", "--target", target, "--vq", picture_decoder, "--config", work / "config.json"]
    draw = ["data", plain, "--images", asked.images, "--shard", min(64, asked.images), "--output", data]
    fit = ["fit", plain, "--data", data, "--steps", asked.steps, "--loss", asked.loss, "--output", drafter]
    measure = ["bench", drafted, "--methods", asked.methods, "--images", asked.bench_images]
    commands = (
        (plain, [*exported, "--output", plain]),
        (None, ["train-drafter", *draw, *threads]),
        (drafter, ["train-drafter", *fit, *threads]),
        (drafted, [*exported, "--drafter", drafter, "--output", drafted]),
        (None, [*measure, *threads]),
    )
    for goal, command in commands:
        if goal is None or not goal.exists():
            print("lantern-rt", *command, flush=True)
            if code := run_program([str(word) for word in command]):
                sys.exit(code)
    with Pipeline.from_bundle(drafted, threads=asked.threads) as pipeline:
        drawn = pipeline(class_ids=list(range(0, CLASSES, 8)), seed=1).images
    contact_sheet([np.stack([np.asarray(image) for image in drawn])], 8, rows=1).save(work / "pictures.png")


def write_checkpoints(asked: argparse.Namespace, work: Path) -> tuple[Path, Path]:
    """The files of transformer and image tokenizer, trained here or before."""
    if not (work / "tokenizer").exists():
        restore_work("scenes", work / "tokenizer", only_vq=True)
    vq = load_vq(work / "tokenizer")
    drawn = (sample_scene(np.random.default_rng(60_000 + i), two_solids=0.0) for i in range(asked.scenes))
    scenes, solids = zip(*((scene, scene.solids[0]) for scene in drawn), strict=True)
    classes = torch.tensor([COLOURS.index(one.colour) * len(SHAPES) + SHAPES.index(one.shape) for one in solids])
    if not (stored := work / "codes.npy").exists():
        np.save(stored, np.concatenate([vq.encode(render_scenes([one], vq.config.picture)) for one in scenes]))
    codes = torch.from_numpy(np.load(stored).astype(np.int64))  # [scenes, cells]
    config = replace(SMOKE_SIZE if asked.smoke else SIZE, vocab_size=vq.config.codes)
    torch.manual_seed(0)
    model, own = ClassModel(config), LlamaGenVQ(decoder_sizes(vq))
    own.codebook = vq.codebook.clone()
    decoder = VQDecoder(own, GRID)

    def next_codes(generator: torch.Generator) -> Tensor:
        chosen = torch.randint(len(codes), (BATCH,), generator=generator)
        unnamed = torch.rand(BATCH, generator=generator) < 0.1
        return model(classes[chosen].where(~unnamed, CLASSES), codes[chosen])

    def next_pictures(generator: torch.Generator) -> Tensor:
        chosen = torch.randint(len(codes), (PICTURES,), generator=generator)
        images = to_tensor(render_scenes([scenes[i] for i in chosen], vq.config.picture, workers=1))
        return picture_loss(decoder(codes[chosen]).float(), images)

    train(work / "transformer-state.pt", model, next_codes, asked.minutes)
    train(work / "decoder-state.pt", decoder, next_pictures, asked.decoder_minutes)
    target, picture_decoder = work / "c2i.pt", work / "vq.pt"
    save_checkpoint(target, {"model": renamed(model.state_dict(), OFFICIAL)})
    save_checkpoint(picture_decoder, {"model": renamed(own.state_dict(), {"codebook": CODEBOOK})})
    (work / "config.json").write_text(json.dumps({"n_head": config.num_heads, "block_size": GRID**2}), "utf-8")
    return target, picture_decoder


def renamed(weights: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """Weights with parts of their names replaced, one after the other."""
    return {reduce(lambda name, pair: name.replace(*pair), names.items(), one): w for one, w in weights.items()}


def decoder_sizes(vq: ScenesVQ) -> VQConfig:
    """A thin tokenizer of LlamaGen's, for pictures as large as those of `scenes`; its encoder is never trained."""
    levels = 1 + int(math.log2(vq.config.picture // GRID))
    return VQConfig(vq.config.codes, CODE_DIM, 96, 32, (32,) * levels, (96, 64, 32, 32, 32)[:levels], 1)


def train(path: Path, model: nn.Module, next_loss: Callable[[torch.Generator], Tensor], minutes: float) -> None:
    """Train until the model has had its minutes, from where `path` stands; the rate falls to zero over half of them."""
    weights = dict(model.named_parameters())
    large = {name: w for name, w in weights.items() if w.ndim > 1 and min(w.shape[:2]) >= 32}
    inner = {name: w for name, w in large.items() if w.ndim == 4 or "layers" in name}
    muon = Muon([*inner.values()], 0.02)
    adam = torch.optim.AdamW([w for name, w in weights.items() if name not in inner], 2e-3, betas=(0.9, 0.95))
    parts = {"model": model, "muon": muon, "adam": adam}
    state = load_checkpoint(path) if path.exists() else {}
    for name in parts.keys() & state.keys():
        parts[name].load_state_dict(state[name])
    step, watch = state.get("step", 0), Stopwatch("cpu", state.get("seconds", 0.0))
    now = saved = watch.seconds()
    while now < 60 * minutes:
        rate = min(1.0, (step + 1) / 60, (1 - now / (60 * minutes)) / 0.5)
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = 0.02 * rate, 2e-3 * rate
        with mixed_precision("cpu"):
            loss = next_loss(torch.Generator().manual_seed(step))
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adam.step()
        step, now = step + 1, watch.seconds()
        if now - saved > EVERY or now >= 60 * minutes:
            print(f"{path.stem} {now:5.0f} s  step {step}  loss {loss.item():.3f}", flush=True)
            saved, states = now, {name: part.state_dict() for name, part in parts.items()}
            save_checkpoint(path, states | {"step": step, "seconds": now})


if __name__ == "__main__":
    try:
        main()
    except LanternError as error:
        sys.exit(f"second_model.py: {error}")
