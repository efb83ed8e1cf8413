"""Readers accept the names of weights that compiled, parallel, sharded, checkpointed and averaged modules save."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_copies import (
    ANOLE,
    C2I,
    COSMOS,
    DRAFTER,
    EMU3,
    LANTERN,
    LUMINA,
    LUMINA2,
    MOVQGAN,
    SIMPLEAR,
    T2I,
    VQ,
    VQGAN,
    config_path,
    copy_published_emu3,
    copy_sharded,
)
from family_readers import (
    read_anole,
    read_emu3,
    read_janus,
    read_llamagen_transformer,
    read_lumina,
    read_lumina2,
    read_simplear,
)
from refusals import error_of
from safetensors.torch import load_file, save_file
from small_janus import random_janus, write_janus
from small_models import save_t5
from torch import Tensor, nn

from lantern_rt.errors import CheckpointError
from lantern_rt.export.checkpoints.deferred import compute_tensor
from lantern_rt.export.checkpoints.files import read_weights
from lantern_rt.export.checkpoints.folders import Checkpoint
from lantern_rt.export.model import BundleContents
from lantern_rt.export.models.cosmos_vq import load_cosmos_vq
from lantern_rt.export.models.decoder import Decoder
from lantern_rt.export.models.eagle import read_drafter
from lantern_rt.export.models.movqgan import read_movqgan
from lantern_rt.export.models.t5 import read_text_encoder
from lantern_rt.export.models.vq_checkpoints import read_llamagen_vq, read_vqgan

Weights = dict[str, Tensor]
Wrap = Callable[[Weights], Weights]


def prefixed(prefix: str) -> Wrap:
    return lambda weights: {prefix + name: weight for name, weight in weights.items()}


def within(part: str) -> Wrap:
    """Return a function that adds a name two levels above every weight, as activation checkpointing does."""

    def wrap(weights: Weights) -> Weights:
        parts = {name: name.split(".") for name in weights}
        return {".".join([*path[:-2], part, *path[-2:]]): weights[name] for name, path in parts.items()}

    return wrap


def averaged(weights: Weights) -> Weights:
    return {"n_averaged": torch.tensor(7), **prefixed("module.")(weights)}


WRAPPERS: dict[str, Wrap] = {
    "compiled": prefixed("_orig_mod."),
    "data-parallel": prefixed("module."),
    "DeepSpeed": prefixed("_forward_module."),
    "FSDP": prefixed("_fsdp_wrapped_module."),
    "checkpointed layers": within("_checkpoint_wrapped_module"),
    "averaged": averaged,
    "compiled, data-parallel": prefixed("module._orig_mod."),
    "data-parallel, compiled": prefixed("_orig_mod.module."),
    "data-parallel twice": prefixed("module.module."),
    "all of them": lambda weights: prefixed("_forward_module.")(
        averaged(prefixed("_fsdp_wrapped_module.")(within("_checkpoint_wrapped_module._orig_mod")(weights)))
    ),
    "averaged, in ema": averaged,
}


def wrap_files(folder: Path, wrapper: str) -> None:
    """Save every file of weights in a folder again, with the names of a wrapped module, and update the index."""
    wrap = WRAPPERS[wrapper]
    in_ema = wrapper.endswith("in ema")
    for path in folder.rglob("*.jit"):
        save_file(
            {name: weight.clone() for name, weight in read_weights(path).items()}, path.with_suffix(".safetensors")
        )
        path.unlink()
    for path in list(folder.rglob("*.safetensors")):
        weights = wrap(load_file(path))
        if in_ema and path.name == "model.safetensors":
            torch.save({"ema": weights}, path.with_name("pytorch_model.bin"))
            path.unlink()
        else:
            save_file(weights, path)
        index = path.with_name("model.safetensors.index.json")
        if index.is_file():
            content = json.loads(index.read_text())
            other_entries = {name: file for name, file in content["weight_map"].items() if file != path.name}
            index.write_text(json.dumps({"weight_map": other_entries | dict.fromkeys(weights, path.name)}))
    for path in [path for suffix in ("pt", "bin", "ckpt") for path in folder.rglob(f"*.{suffix}")]:
        content = torch.load(path, weights_only=True)
        if "ema" not in content:
            weights = wrap(next((content[key] for key in ("model", "state_dict") if key in content), content))
            torch.save({"ema" if in_ema else "model": weights}, path)


# ---------------------------------------------------------------- readers


def copy_into(*sources: Path) -> Callable[[Path], None]:
    def copy(folder: Path) -> None:
        for source in sources:
            if source.is_dir():
                shutil.copytree(source, folder, dirs_exist_ok=True)
            else:
                shutil.copy(source, folder)

    return copy


def cosmos(folder: Path) -> nn.Module:
    return load_cosmos_vq(Checkpoint(folder, "vq"))


def small_drafter(folder: Path) -> object:
    return read_drafter(folder, target())


def target() -> Decoder:
    return read_llamagen_transformer(T2I, config=config_path(T2I)).decoder


# By name: function that writes a checkpoint's folder, and function that reads it.
READERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "LlamaGen": (
        copy_into(C2I),
        lambda folder: read_llamagen_transformer(folder / C2I.name, config=config_path(C2I)),
    ),
    "LlamaGen in LANTERN's layout": (copy_into(LANTERN / "t2i"), read_llamagen_transformer),
    "LlamaGen in shards": (
        lambda folder: copy_sharded(LANTERN / "c2i", folder / "shards"),
        lambda folder: read_llamagen_transformer(folder / "shards"),
    ),
    "LlamaGen's image tokenizer": (copy_into(VQ), lambda folder: read_llamagen_vq(folder / VQ.name)),
    "a drafter": (copy_into(DRAFTER), small_drafter),
    "a text encoder": (save_t5, lambda folder: read_text_encoder(folder, 32)),
    "Anole": (copy_into(ANOLE), lambda folder: read_anole(folder, VQGAN)),
    "Chameleon's image tokenizer": (copy_into(VQGAN), read_vqgan),
    "Lumina-mGPT": (copy_into(LUMINA), lambda folder: read_lumina(folder, VQGAN, grid=4)),
    "Lumina-mGPT 2.0": (copy_into(LUMINA2), lambda folder: read_lumina2(folder, MOVQGAN, grid=8)),
    "MoVQGAN": (copy_into(MOVQGAN), read_movqgan),
    "Janus in shards": (lambda folder: write_janus(random_janus(), folder), read_janus),
    "Emu3": (copy_into(EMU3), lambda folder: read_emu3(folder, grid=4)),
    "Emu3 as published": (
        copy_published_emu3,
        lambda folder: read_emu3(folder / "Emu3-Gen", folder / "Emu3-VisionTokenizer", grid=4),
    ),
    "SimpleAR": (copy_into(SIMPLEAR), lambda folder: read_simplear(folder, COSMOS, grid=4)),
    "Cosmos": (copy_into(COSMOS), cosmos),
}


def tensors(result: Any) -> Iterator[Tensor]:
    """Yield all tensors in the result of a reader, in order."""
    if isinstance(result, Tensor):
        yield compute_tensor(result)
    elif isinstance(result, nn.Module):
        yield from map(compute_tensor, result.state_dict().values())
    elif isinstance(result, BundleContents):
        yield from tensors([*(graph.module for graph in result.graphs), result.code_embeddings])
    elif isinstance(result, tuple | list):
        for part in result:
            yield from tensors(part)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Tensor]]]:
    """Return a function that writes a reader's folder once, and returns it with its tensors."""
    torch.set_num_threads(1)
    cache: dict[str, tuple[Path, list[Tensor]]] = {}

    def checkpoint(reader: str) -> tuple[Path, list[Tensor]]:
        if reader not in cache:
            write, read = READERS[reader]
            folder = tmp_path_factory.mktemp("plain")
            write(folder)
            cache[reader] = folder, list(tensors(read(folder)))
        return cache[reader]

    return checkpoint


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("reader", READERS)
def test_a_wrapped_checkpoint_reads_as_the_plain_one(
    checkpoints: Callable[[str], tuple[Path, list[Tensor]]], tmp_path: Path, reader: str, wrapper: str
) -> None:
    folder, expected = checkpoints(reader)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    wrap_files(tmp_path, wrapper)
    wrapped_tensors = list(tensors(READERS[reader][1](tmp_path)))
    assert len(expected) > 5
    assert len(wrapped_tensors) == len(expected)
    assert all(map(torch.equal, wrapped_tensors, expected))


@pytest.mark.parametrize("weights", [True, False])
def test_averaged_weights_besides_the_models_are_unwrapped(tmp_path: Path, weights: bool) -> None:
    plain = {"a.weight": torch.ones(2)}
    torch.save({"model": plain, "ema": averaged({"a.weight": torch.full((2,), 2.0)})}, tmp_path / "a.pt")
    assert read_weights(tmp_path / "a.pt", prefer_ema=weights)["a.weight"].tolist() == [1.0 + weights] * 2


def test_two_weights_whose_names_differ_only_by_wrappers_are_rejected(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(2), "module.a.weight": torch.zeros(2)}, tmp_path / "a.pt")
    error = error_of(CheckpointError, read_weights, tmp_path / "a.pt")
    assert error.field == f"{tmp_path / 'a.pt'}: module.a.weight"
    assert error.problem == "is a second a.weight"
