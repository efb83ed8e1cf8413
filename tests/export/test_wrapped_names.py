"""Checkpoints of wrapped modules: prefixes of weight names from PyTorch wrappers are removed when a file is read."""

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
    JANUS_CONVERTED,
    LANTERN,
    LUMINA,
    LUMINA2,
    MOVQGAN,
    SIMPLEAR,
    T2I,
    VQ,
    VQGAN,
    config_path,
    copy_as_shards,
    copy_published_emu3,
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
from refusals import catch_error
from safetensors.torch import load_file, save_file
from small_models import save_t5
from torch import Tensor, nn

from lantern_rt.errors import CheckpointError
from lantern_rt.export.checkpoints.deferred import compute_deferred_tensor
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
Wrapper = Callable[[Weights], Weights]  # returns the weights under the names that a wrapper module saves


def add_prefix(prefix: str) -> Wrapper:
    return lambda weights: {prefix + name: weight for name, weight in weights.items()}


def add_inner_name(name_part: str) -> Wrapper:
    """Return a function that inserts `name_part` before the last two parts of names, like activation checkpointing."""

    def wrap(weights: Weights) -> Weights:
        parts = {name: name.split(".") for name in weights}
        return {".".join([*path[:-2], name_part, *path[-2:]]): weights[name] for name, path in parts.items()}

    return wrap


def add_average_names(weights: Weights) -> Weights:
    """Return the weights as `torch.optim.swa_utils.AveragedModel` saves them."""
    return {"n_averaged": torch.tensor(7), **add_prefix("module.")(weights)}


WRAPPERS: dict[str, Wrapper] = {
    "compiled": add_prefix("_orig_mod."),
    "data-parallel": add_prefix("module."),
    "DeepSpeed": add_prefix("_forward_module."),
    "FSDP": add_prefix("_fsdp_wrapped_module."),
    "checkpointed layers": add_inner_name("_checkpoint_wrapped_module"),
    "averaged": add_average_names,
    "compiled, data-parallel": add_prefix("module._orig_mod."),
    "data-parallel, compiled": add_prefix("_orig_mod.module."),
    "data-parallel twice": add_prefix("module.module."),
    "all of them": lambda weights: add_prefix("_forward_module.")(
        add_average_names(
            add_prefix("_fsdp_wrapped_module.")(add_inner_name("_checkpoint_wrapped_module._orig_mod")(weights))
        )
    ),
    "averaged, in ema": add_average_names,
}


def wrap_files(folder: Path, wrapper: str) -> None:
    """Rename the weights in all files of a folder as a wrapped module names them, and update the index."""
    rename_weights = WRAPPERS[wrapper]
    in_ema = wrapper.endswith("in ema")
    for path in folder.rglob("*.jit"):
        save_file(
            {name: weight.clone() for name, weight in read_weights(path).items()}, path.with_suffix(".safetensors")
        )
        path.unlink()
    for path in list(folder.rglob("*.safetensors")):
        weights = rename_weights(load_file(path))
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
            weights = rename_weights(next((content[key] for key in ("model", "state_dict") if key in content), content))
            torch.save({"ema" if in_ema else "model": weights}, path)


# ---------------------------------------------------------------- readers


def make_copier(*sources: Path) -> Callable[[Path], None]:
    """Return a function that copies files, and the content of folders, to a folder."""

    def copy(folder: Path) -> None:
        for source in sources:
            if source.is_dir():
                shutil.copytree(source, folder, dirs_exist_ok=True)
            else:
                shutil.copy(source, folder)

    return copy


def read_cosmos(folder: Path) -> nn.Module:
    return load_cosmos_vq(Checkpoint(folder, "vq"))


def read_small_drafter(folder: Path) -> object:
    return read_drafter(folder, read_small_target())


def read_small_target() -> Decoder:
    return read_llamagen_transformer(T2I, config=config_path(T2I)).decoder


# By name: function that writes a checkpoint to a folder, and function that reads the folder.
READERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "LlamaGen": (
        make_copier(C2I),
        lambda folder: read_llamagen_transformer(folder / C2I.name, config=config_path(C2I)),
    ),
    "LlamaGen in LANTERN's layout": (make_copier(LANTERN / "t2i"), read_llamagen_transformer),
    "LlamaGen in shards": (
        lambda folder: copy_as_shards(LANTERN / "c2i", folder / "shards"),
        lambda folder: read_llamagen_transformer(folder / "shards"),
    ),
    "LlamaGen's image tokenizer": (make_copier(VQ), lambda folder: read_llamagen_vq(folder / VQ.name)),
    "a drafter": (make_copier(DRAFTER), read_small_drafter),
    "a text encoder": (save_t5, lambda folder: read_text_encoder(folder, 32)),
    "Anole": (make_copier(ANOLE), lambda folder: read_anole(folder, VQGAN)),
    "Chameleon's image tokenizer": (make_copier(VQGAN), read_vqgan),
    "Lumina-mGPT": (make_copier(LUMINA), lambda folder: read_lumina(folder, VQGAN, grid=4)),
    "Lumina-mGPT 2.0": (make_copier(LUMINA2), lambda folder: read_lumina2(folder, MOVQGAN, grid=8)),
    "MoVQGAN": (make_copier(MOVQGAN), read_movqgan),
    "Janus in shards": (
        lambda folder: copy_as_shards(JANUS_CONVERTED, folder / "shards"),
        lambda folder: read_janus(folder / "shards"),
    ),
    "Emu3": (make_copier(EMU3), lambda folder: read_emu3(folder, grid=4)),
    "Emu3 as published": (
        copy_published_emu3,
        lambda folder: read_emu3(folder / "Emu3-Gen", folder / "Emu3-VisionTokenizer", grid=4),
    ),
    "SimpleAR": (make_copier(SIMPLEAR), lambda folder: read_simplear(folder, COSMOS, grid=4)),
    "Cosmos": (make_copier(COSMOS), read_cosmos),
}


def list_tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield compute_deferred_tensor(result)
    elif isinstance(result, nn.Module):
        yield from map(compute_deferred_tensor, result.state_dict().values())
    elif isinstance(result, BundleContents):
        yield from list_tensors([*(graph.module for graph in result.graphs), result.code_embeddings])
    elif isinstance(result, tuple | list):
        for item in result:
            yield from list_tensors(item)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Tensor]]]:
    """Return a function that writes a reader's checkpoint at the first call, and returns the folder and the tensors."""
    torch.set_num_threads(1)
    cache: dict[str, tuple[Path, list[Tensor]]] = {}

    def write_checkpoint(reader: str) -> tuple[Path, list[Tensor]]:
        if reader not in cache:
            write, read = READERS[reader]
            folder = tmp_path_factory.mktemp("unwrapped")
            write(folder)
            cache[reader] = folder, list(list_tensors(read(folder)))
        return cache[reader]

    return write_checkpoint


# Names are unwrapped where a file is read, whatever reads it: every wrapper with two layouts, every reader with two.
CASES = [(reader, wrapper) for reader in READERS for wrapper in ("all of them", "averaged, in ema")]
CASES += [(reader, wrapper) for reader in ("LlamaGen", "LlamaGen in shards") for wrapper in [*WRAPPERS][:-2]]


@pytest.mark.parametrize(("reader", "wrapper"), CASES)
def test_a_wrapped_modules_checkpoint_is_read_as_the_unwrapped(
    checkpoints: Callable[[str], tuple[Path, list[Tensor]]], tmp_path: Path, reader: str, wrapper: str
) -> None:
    folder, expected = checkpoints(reader)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    wrap_files(tmp_path, wrapper)
    wrapped_tensors = list(list_tensors(READERS[reader][1](tmp_path)))
    assert len(expected) > 5
    assert len(wrapped_tensors) == len(expected)
    assert all(map(torch.equal, wrapped_tensors, expected))


@pytest.mark.parametrize("prefer_ema", [True, False])
def test_averaged_weights_are_read_by_their_unwrapped_names(tmp_path: Path, prefer_ema: bool) -> None:
    model_weights = {"a.weight": torch.ones(2)}
    torch.save(
        {"model": model_weights, "ema": add_average_names({"a.weight": torch.full((2,), 2.0)})}, tmp_path / "a.pt"
    )
    assert (
        read_weights(tmp_path / "a.pt", prefer_ema=prefer_ema)["a.weight"].tolist() == [2.0 if prefer_ema else 1.0] * 2
    )


def test_two_weights_of_one_unwrapped_name_are_rejected(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(2), "module.a.weight": torch.zeros(2)}, tmp_path / "a.pt")
    error = catch_error(CheckpointError, read_weights, tmp_path / "a.pt")
    assert error.field == f"{tmp_path / 'a.pt'}: module.a.weight"
    assert error.problem == "is a second a.weight"
