"""Functions that return readers of edited checkpoints, for tables of invalid checkpoints."""

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
    COSMOS,
    DRAFTER,
    EMU3,
    EMU35,
    EMU35_VQ,
    GEAR,
    GEAR_FILES,
    GLM_IMAGE,
    JANUS,
    JANUS_CONVERTED,
    LANTERN,
    LUMINA,
    LUMINA2,
    MASKGIT_VQ,
    MOVQGAN,
    PROLOGUE,
    PROLOGUE_CONFIG,
    PROLOGUE_VQ,
    QWEN3,
    RAR,
    SIMPLEAR,
    T2I,
    VQ,
    VQGAN,
    config_path,
    copy_as_shards,
    copy_checkpoint,
    copy_gear,
    copy_json,
    copy_published_emu3,
    copy_weights,
)
from family_readers import (
    read_anole,
    read_emu3,
    read_emu35,
    read_gear,
    read_glm_image,
    read_janus,
    read_llamagen,
    read_llamagen_transformer,
    read_lumina,
    read_lumina2,
    read_prologue,
    read_rar,
    read_simplear,
)
from goldens import DATA
from safetensors.torch import load_file, save_file
from small_models import save_t5

from lantern_rt.export.checkpoints.folders import Checkpoint
from lantern_rt.export.models.t5 import read_text_encoder
from lantern_rt.export.registry import read_family_checkpoints

# Function of an empty folder that copies a checkpoint to the folder, changes the copy and reads the copy.
Reader = Callable[[Path], object]
READERS: dict[Path, Reader] = {
    ANOLE: lambda target: read_anole(target, VQGAN),
    LUMINA: lambda target: read_lumina(target, VQGAN, grid=4),
    LUMINA2: lambda target: read_lumina2(target, MOVQGAN, grid=8),
    EMU3: lambda target: read_emu3(target, grid=4),
    EMU35: lambda target: read_emu35(target, EMU35_VQ),
    SIMPLEAR: lambda target: read_simplear(target, COSMOS, grid=4),
    JANUS: read_janus,
    JANUS_CONVERTED: read_janus,
    QWEN3: lambda text_encoder: read_gear(GEAR, **GEAR_FILES | {"text_encoder": text_encoder}),
    GLM_IMAGE: lambda target: read_glm_image(target, grid=2),
}
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4180000000\n"
# Aliases that expand to 2^24 lists.
NESTED_ALIASES = "\n".join(
    [
        "a0: &a0 []",
        *(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]" for i in range(24)),
        "model: {params: {n_embed: 128, ddconfig: {resolution: *a24}}}",
    ]
)
GROUP_MODELS = {"nar": DATA / "nar/c2i/nar_c2i.pt", "par": DATA / "par/4x/par_4x.pt"}


def edit(
    source: Path,
    weights: Any = None,
    config: Any = None,
    tokens: dict[str, int] | None = None,
    tokenizer: Callable[[str], str] | None = None,
    files: dict[str, Callable[[str], str]] | None = None,
    without: str = "",
    **fields: Any,
) -> Reader:
    """Return a reader of an edited copy of a checkpoint; `tokens` are of its vocabulary, `files` edit texts."""

    def read(folder: Path) -> None:
        target = shutil.copytree(source, folder / "target")
        if weights or config or fields:
            copy_checkpoint(source, target, weights, config, **fields)
        if tokens:
            copy_checkpoint(source, target, config=lambda content: content["vocabulary_map"].update(tokens))
        changes = dict(files or {})
        if tokenizer:
            changes["tokenizer.json"] = tokenizer
        for name, change in changes.items():
            (target / name).write_text(change((target / name).read_text()))
        if without:
            (target / without).unlink()
        READERS[source](target)

    return read


def edit_json(change: Callable[[Any], object]) -> Callable[[str], str]:
    """Return a function that edits the text of a JSON file; `change` changes the object in place."""

    def edit_text(text: str) -> str:
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return edit_text


def edit_glm(part: str, change: Callable[[Any], object]) -> Reader:
    return edit(GLM_IMAGE, files={part: edit_json(change)})


def edit_llamagen(edit: Any = None, **fields: Any) -> Reader:
    """Return a reader of an edited LlamaGen target; `edit` changes weights, `fields` replace configuration fields."""
    return lambda folder: read_llamagen_transformer(
        copy_weights(folder, C2I, edit or (lambda weights: None)),
        config=copy_json(config_path(C2I), folder / "config.json", **fields),
    )


def edit_gear(edit: Any = None, **arguments: Any) -> Reader:
    """Return a reader of GEAR-T2I with edited weights and other training arguments; None removes an argument."""
    return lambda folder: read_gear(copy_gear(folder, edit or (lambda weights: None), **arguments), **GEAR_FILES)


def edit_groups(
    family: str, source: str = "", target: Path | None = None, grid: int | None = 4, **fields: Any
) -> Reader:
    """Return a reader of NAR or PAR (the checkpoint is of `source`) whose configuration has these fields."""
    heads = {"nar": 2, "par": 4}[source or family]

    def read(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({"n_head": heads, **fields}))
        files = {"target": target or GROUP_MODELS[source or family], "vq": VQ, "config": folder / "config.json"}
        read_family_checkpoints(family, files | ({"grid": grid} if grid else {}))

    return read


def edit_rar(change: Callable[[Any], object], source: Path = RAR) -> Reader:
    """Return a reader of RAR with changed weights, of the target or of the image tokenizer."""

    def read(folder: Path) -> None:
        weights = torch.load(source, weights_only=True)
        change(weights)
        files = {path: path for path in (RAR, MASKGIT_VQ)} | {source: folder / source.name}
        torch.save(weights, files[source])
        read_rar(files[RAR], files[MASKGIT_VQ])

    return read


def read_groups_with_code(family: str) -> Reader:
    def read(folder: Path) -> None:
        content = torch.load(GROUP_MODELS[family], weights_only=True)
        torch.save({**content, "scheduler": print}, folder / "target.pt")
        edit_groups(family, target=folder / "target.pt")(folder)

    return read


def edit_prologue(name: str = "", change: Any = None, **fields: Any) -> Reader:
    """Return a reader of Prologue; `change` edits the weights of a file, `fields` replace fields of the settings."""

    def read(folder: Path) -> None:
        for part in (PROLOGUE, PROLOGUE_VQ):
            shutil.copytree(part, folder / part.name)
        if name:
            weights = load_file(folder / name)
            change(weights)
            save_file(weights, folder / name)
        config = copy_json(PROLOGUE_CONFIG, folder / "config.json", **fields)
        read_prologue(folder / "ar", folder / "tokenizer", config=config)

    return read


def edit_drafter(edit: Any = None, **fields: Any) -> Reader:
    return lambda folder: read_llamagen(
        T2I, VQ, drafter=copy_checkpoint(DRAFTER, folder / "drafter", edit, **fields), config=config_path(T2I)
    )


def edit_published_emu3(name: str, old: str, new: str, **fields: Any) -> Reader:
    """Return a reader of Emu3 in the published format, with a replacement in a file of the tokenizer."""

    def read(folder: Path) -> None:
        target, vq = copy_published_emu3(folder)
        (target / name).write_text((target / name).read_text().replace(old, new))
        copy_json(target / "config.json", target / "config.json", **fields)
        read_emu3(target, vq, grid=4)

    return read


def edit_text_encoder(weights: Any = None, sizes: dict[str, Any] | None = None, **fields: Any) -> Reader:
    """Return a reader of a T5 with these sizes, edited weights and replaced configuration fields."""

    def read(folder: Path) -> None:
        save_t5(folder / "saved", **(sizes or {}))
        read_text_encoder(copy_checkpoint(folder / "saved", folder / "t5", weights, **fields), 32)

    return read


def replace_vqgan_config(yaml: str | None) -> Reader:
    """Return a reader of Anole whose image tokenizer has this YAML file; None removes the file."""

    def read(folder: Path) -> None:
        shutil.copytree(VQGAN, folder / "vq")
        if yaml is None:
            (folder / "vq/vqgan.yaml").unlink()
        else:
            (folder / "vq/vqgan.yaml").write_text(yaml)
        read_anole(ANOLE, folder / "vq")

    return read


def write_index(content: Any) -> Reader:
    """Return a reader of a folder that holds only this index of safetensors files."""

    def read(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
        Checkpoint(folder).read_weights()

    return read


def copy_vq_file(source: Path, read_folder: Reader, name: str = "") -> Reader:
    """Return a reader of a folder that holds only one file of an image tokenizer."""

    def read(folder: Path) -> None:
        (folder / "vq").mkdir()
        shutil.copy(source, folder / "vq" / (name or source.name))
        read_folder(folder / "vq")

    return read


def remove_files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).unlink()
    return folder


def read_duplicate_weights(folder: Path) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save({"x": torch.ones(2)}, folder / name)
    Checkpoint(folder).read_weights()


def read_metas_layout(folder: Path) -> None:
    (folder / "models/7b").mkdir(parents=True)
    (folder / "models/7b/params.json").write_text("{}")
    torch.save({"tok_embeddings.weight": torch.zeros(4, 4)}, folder / "models/7b/consolidated.pth")
    READERS[ANOLE](folder)


def read_wrong_shard(folder: Path) -> None:
    shards = copy_as_shards(LANTERN / "t2i", folder / "shards")
    shutil.copy(shards / "model-00001-of-00003.safetensors", shards / "model-00002-of-00003.safetensors")
    Checkpoint(shards).read_weights()


def read_duplicate_field(folder: Path) -> None:
    (folder / "config.json").write_text('{"n_head": 4, "n_head": 8}')
    read_llamagen_transformer(C2I, config=folder / "config.json")


def read_small_codebook(folder: Path) -> None:
    name = "quantize.embedding.weight"
    small_codebook = copy_weights(folder, VQ, lambda w: w.update({name: w[name][:100]}))
    read_llamagen(C2I, small_codebook, config=config_path(C2I))


def remove_weights(*prefixes: str) -> Callable[[dict[str, Any]], None]:
    """Return a function that deletes all weights whose names begin with one of the prefixes."""

    def edit(weights: dict[str, Any]) -> None:
        for name in [name for name in weights if name.startswith(prefixes)]:
            del weights[name]

    return edit


def convert_to_booleans(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda weights: weights.update({name: weights[name] > 0})


def rename_weight(name: str, new_name: str) -> Callable[[dict[str, Any]], None]:
    return lambda weights: weights.update({new_name: weights.pop(name)})


def swap_tokens(content: dict[str, Any]) -> None:
    content["model"]["vocab"] |= {"<racm3:break>": 132, "<eoss>": 133}
    content["added_tokens"] = []


def read_early_row_end(folder: Path) -> None:
    """Read Lumina-mGPT with the row-end token at id 3, before the image tokens, which begin at id 4."""
    names = {"<reserved08799>": "<unk>", "<unk>": "<reserved08799>"}

    def rename_tokens(content: dict[str, Any]) -> None:
        for entry in content["added_tokens"]:
            entry["content"] = names.get(entry["content"], entry["content"])
        vocabulary = content["model"]["vocab"]
        content["model"]["vocab"] = {names.get(name, name): token for name, token in vocabulary.items()}

    edit(
        LUMINA,
        tokens={"<reserved08799>": 3, "<unk>": 142},
        tokenizer=edit_json(rename_tokens),
    )(folder)
