"""Copies of the small checkpoints with something wrong, each as a function that makes one in a folder and reads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoint_copies import (
    ANOLE,
    C2I,
    DRAFTER,
    EMU3,
    LANTERN,
    LUMINA,
    T2I,
    VQ,
    VQGAN,
    changed,
    config_of,
    copied,
    edited,
    sharded,
)
from emu3_copies import published
from small_models import save_t5

from lantern_rt.export.checkpoints.folders import Checkpoint
from lantern_rt.export.families.anole import read_anole
from lantern_rt.export.families.emu3 import read_emu3
from lantern_rt.export.families.llamagen import read_llamagen, read_transformer
from lantern_rt.export.families.lumina import read_lumina
from lantern_rt.export.models.t5 import read_text_encoder

Read = Callable[[Path], object]  # makes a damaged copy in a folder and reads it


def official(edit: Any = None, **fields: Any) -> Read:
    return lambda folder: read_transformer(
        edited(folder, C2I, edit or (lambda weights: None)),
        config=changed(config_of(C2I), folder / "config.json", **fields),
    )


def lantern(edit: Any = None, **fields: Any) -> Read:
    return lambda folder: read_transformer(copied(LANTERN / "t2i", folder, edit, **fields))


def drafter(edit: Any = None, **fields: Any) -> Read:
    return lambda folder: read_llamagen(
        T2I, VQ, drafter=copied(DRAFTER, folder / "drafter", edit, **fields), config=config_of(T2I)
    )


def anole(weights: Any = None, config: Any = None, **fields: Any) -> Read:
    return lambda folder: read_anole(copied(ANOLE, folder / "target", weights, config, **fields), VQGAN)


def lumina(weights: Any = None, config: Any = None, **fields: Any) -> Read:
    return lambda folder: read_lumina(copied(LUMINA, folder / "target", weights, config, **fields), VQGAN, grid=4)


def emu3(weights: Any = None, config: Any = None, **fields: Any) -> Read:
    return lambda folder: read_emu3(copied(EMU3, folder / "target", weights, config, **fields), grid=4)


def emu3_tokenizer(name: str, edit: Callable[[str], str], **fields: Any) -> Read:
    def read(folder: Path) -> None:
        target, vq = published(folder)
        (target / name).write_text(edit((target / name).read_text()))
        changed(target / "config.json", target / "config.json", **fields)
        read_emu3(target, vq, grid=4)

    return read


def text_encoder(weights: Any = None, sizes: dict[str, Any] | None = None, **fields: Any) -> Read:
    def read(folder: Path) -> None:
        save_t5(folder / "saved", **(sizes or {}))
        read_text_encoder(copied(folder / "saved", folder / "t5", weights, **fields), 32)

    return read


def vqgan(yaml: str | None) -> Read:
    def read(folder: Path) -> None:
        shutil.copytree(VQGAN, folder / "vq")
        if yaml is None:
            (folder / "vq/vqgan.yaml").unlink()
        else:
            (folder / "vq/vqgan.yaml").write_text(yaml)
        read_anole(ANOLE, folder / "vq")

    return read


def index(content: Any) -> Read:
    def read(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
        Checkpoint(folder).read()

    return read


def tokenizer(edit: Callable[[dict[str, Any]], object]) -> Read:
    def read(folder: Path) -> None:
        target = copied(ANOLE, folder / "target")
        content = json.loads((target / "tokenizer.json").read_text())
        edit(content)
        (target / "tokenizer.json").write_text(json.dumps(content))
        read_anole(target, VQGAN)

    return read


def without(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).unlink()
    return folder


def loose(folder: Path) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save({"x": torch.ones(2)}, folder / name)
    Checkpoint(folder).read()


def wrong_shard(folder: Path) -> None:
    shards = sharded(LANTERN / "t2i", folder / "shards")
    shutil.copy(shards / "model-00001-of-00003.safetensors", shards / "model-00002-of-00003.safetensors")
    Checkpoint(shards).read()


def few_codes(folder: Path) -> None:
    narrow = edited(folder, VQ, lambda w: w.update({"quantize.embedding.weight": w["quantize.embedding.weight"][:100]}))
    read_llamagen(C2I, narrow, config=config_of(C2I))


def drop(*prefixes: str) -> Callable[[dict[str, Any]], None]:
    def edit(weights: dict[str, Any]) -> None:
        for name in [name for name in weights if name.startswith(prefixes)]:
            del weights[name]

    return edit


def move(one: str, other: str) -> Callable[[dict[str, Any]], None]:
    return lambda weights: weights.update({other: weights.pop(one)})


def swap_tokens(content: dict[str, Any]) -> None:
    content["model"]["vocab"] |= {"<racm3:break>": 132, "<eoss>": 133}
    content["added_tokens"] = []


def early_row_end(folder: Path) -> None:
    names = {"<reserved08799>": "<unk>", "<unk>": "<reserved08799>"}
    target = copied(LUMINA, folder, config=lambda c: c["vocabulary_map"].update({"<reserved08799>": 3, "<unk>": 142}))
    content = json.loads((target / "tokenizer.json").read_text())
    for entry in content["added_tokens"]:
        entry["content"] = names.get(entry["content"], entry["content"])
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {names.get(name, name): token for name, token in vocabulary.items()}
    (target / "tokenizer.json").write_text(json.dumps(content))
    read_lumina(target, VQGAN, grid=4)
