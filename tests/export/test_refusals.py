"""Errors of invalid checkpoints: the message names the file, the field or weight, and the invalid value."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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
    config_path,
    copy_as_shards,
    copy_checkpoint,
    copy_json,
    copy_published_emu3,
    copy_weights,
)
from family_readers import read_anole, read_emu3, read_llamagen, read_llamagen_transformer, read_lumina
from refusals import catch_error
from small_models import save_t5

from lantern_rt.errors import CheckpointError, LanternError
from lantern_rt.export.checkpoints.folders import Checkpoint
from lantern_rt.export.models.t5 import read_text_encoder
from lantern_rt.export.models.vq_checkpoints import read_llamagen_vq

# Function of an empty folder that copies a checkpoint to the folder, changes the copy and reads the copy.
Reader = Callable[[Path], object]


def edit_llamagen(edit: Any = None, **fields: Any) -> Reader:
    """Return a reader of an edited LlamaGen target; `edit` changes weights, `fields` replace configuration fields."""
    return lambda folder: read_llamagen_transformer(
        copy_weights(folder, C2I, edit or (lambda weights: None)),
        config=copy_json(config_path(C2I), folder / "config.json", **fields),
    )


def edit_drafter(edit: Any = None, **fields: Any) -> Reader:
    """Return a reader of a drafter with edited weights and replaced configuration fields."""
    return lambda folder: read_llamagen(
        T2I, VQ, drafter=copy_checkpoint(DRAFTER, folder / "drafter", edit, **fields), config=config_path(T2I)
    )


def edit_anole(weights: Any = None, config: Any = None, **fields: Any) -> Reader:
    """Return a reader of Anole with the changes of `copy_checkpoint`."""
    return lambda folder: read_anole(copy_checkpoint(ANOLE, folder / "target", weights, config, **fields), VQGAN)


def edit_lumina(weights: Any = None, config: Any = None, **fields: Any) -> Reader:
    """Return a reader of Lumina-mGPT with the changes of `copy_checkpoint`."""
    return lambda folder: read_lumina(
        copy_checkpoint(LUMINA, folder / "target", weights, config, **fields), VQGAN, grid=4
    )


def edit_emu3(weights: Any = None, config: Any = None, **fields: Any) -> Reader:
    """Return a reader of Emu3 with the changes of `copy_checkpoint`."""
    return lambda folder: read_emu3(copy_checkpoint(EMU3, folder / "target", weights, config, **fields), grid=4)


def edit_emu3_tokenizer(name: str, edit: Callable[[str], str], **fields: Any) -> Reader:
    """Return a reader of Emu3 in the published format with an edited tokenizer file.

    Args:
        name: name of the tokenizer file.
        edit: function from the old text of the file to the new text.
        **fields: fields of the configuration to replace; None removes a field.
    """

    def read(folder: Path) -> None:
        target, vq = copy_published_emu3(folder)
        (target / name).write_text(edit((target / name).read_text()))
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


def edit_anole_tokenizer(edit: Callable[[dict[str, Any]], object]) -> Reader:
    """Return a reader of Anole; `edit` changes the object of `tokenizer.json` in place."""

    def read(folder: Path) -> None:
        target = copy_checkpoint(ANOLE, folder / "target")
        content = json.loads((target / "tokenizer.json").read_text())
        edit(content)
        (target / "tokenizer.json").write_text(json.dumps(content))
        read_anole(target, VQGAN)

    return read


def remove_files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).unlink()
    return folder


def read_duplicate_weights(folder: Path) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save({"x": torch.ones(2)}, folder / name)
    Checkpoint(folder).read_weights()


def read_wrong_shard(folder: Path) -> None:
    shards = copy_as_shards(LANTERN / "t2i", folder / "shards")
    shutil.copy(shards / "model-00001-of-00003.safetensors", shards / "model-00002-of-00003.safetensors")
    Checkpoint(shards).read_weights()


def read_duplicate_field(folder: Path) -> None:
    (folder / "config.json").write_text('{"n_head": 4, "n_head": 8}')
    read_llamagen_transformer(C2I, config=folder / "config.json")


def read_small_codebook(folder: Path) -> None:
    small_codebook = copy_weights(
        folder, VQ, lambda w: w.update({"quantize.embedding.weight": w["quantize.embedding.weight"][:100]})
    )
    read_llamagen(C2I, small_codebook, config=config_path(C2I))


def remove_weights(*prefixes: str) -> Callable[[dict[str, Any]], None]:
    """Return a function that deletes all weights whose names begin with one of the prefixes."""

    def edit(weights: dict[str, Any]) -> None:
        for name in [name for name in weights if name.startswith(prefixes)]:
            del weights[name]

    return edit


def rename_weight(name: str, new_name: str) -> Callable[[dict[str, Any]], None]:
    return lambda weights: weights.update({new_name: weights.pop(name)})


def swap_tokens(content: dict[str, Any]) -> None:
    content["model"]["vocab"] |= {"<racm3:break>": 132, "<eoss>": 133}
    content["added_tokens"] = []


def read_early_row_end(folder: Path) -> None:
    """Read Lumina-mGPT with the row-end token at id 3, before the image tokens, which begin at id 4."""
    names = {"<reserved08799>": "<unk>", "<unk>": "<reserved08799>"}
    target = copy_checkpoint(
        LUMINA, folder, config=lambda c: c["vocabulary_map"].update({"<reserved08799>": 3, "<unk>": 142})
    )
    content = json.loads((target / "tokenizer.json").read_text())
    for entry in content["added_tokens"]:
        entry["content"] = names.get(entry["content"], entry["content"])
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {names.get(name, name): token for name, token in vocabulary.items()}
    (target / "tokenizer.json").write_text(json.dumps(content))
    read_lumina(target, VQGAN, grid=4)


ROTARY_TABLE = {"freqs_cis": torch.zeros(1 + 25, 8, 2)}  # one prefix position and 5 x 5 cells

# By name: function that reads the checkpoint, last part of the invalid field's name, words of the message.
INVALID_CHECKPOINTS: dict[str, tuple[Reader, str, str]] = {
    # LlamaGen's official files
    "width that differs from the weights": (edit_llamagen(dim=128), "config.json: dim", "128 64"),
    "text condition for class weights": (edit_llamagen(model_type="t2i"), "config.json: model_type", "'t2i' 'c2i'"),
    "number of heads that does not divide the width": (
        edit_llamagen(n_head=5),
        "config.json: n_head",
        "5 a number that divides the width 64",
    ),
    "number of heads as text": (edit_llamagen(n_head="four"), "config.json: n_head", "'four' a whole number"),
    "head width that is not a multiple of 4": (edit_llamagen(n_head=32), "config.json: n_head", "a multiple of 4"),
    "wrong number of key heads": (
        edit_llamagen(n_kv_head=2),
        "layers.0.attention.wqkv.weight",
        "192 rows 4 heads of 16",
    ),
    "non-square number of codes": (edit_llamagen(block_size=17), "config.json: block_size", "17 codes a square number"),
    "norm epsilon of zero": (edit_llamagen(norm_eps=0), "config.json: norm_eps", "0 a positive number"),
    "too large norm epsilon": (edit_llamagen(norm_eps=1e308), "config.json: norm_eps", "1e+308 number up to 3.4e+38"),
    "an unknown field": (
        edit_llamagen(n_heads=4),
        "config.json: n_heads",
        "unknown field block_size, caption_dim n_head,",
    ),
    "wrong feed-forward width": (edit_llamagen(multiple_of=96), "config.json: multiple_of", "96 170 192 256"),
    "duplicate field": (read_duplicate_field, "config.json", "the key 'n_head' twice, with different values"),
    "unknown option for weights": (
        lambda folder: read_llamagen(C2I, VQ, weights="best"),
        "weights",
        "'best' model or ema",
    ),
    "a missing weight": (
        edit_llamagen(rename_weight("layers.1.attention.wo.weight", "layers.1.extra")),
        C2I.name,
        "missing: layers.1.attention.wo.weight unexpected: layers.1.extra",
    ),
    "norm weight of the wrong shape": (
        edit_llamagen(lambda w: w.update({"norm.weight": torch.ones(63)})),
        C2I.name,
        "norm.weight [63] [64]",
    ),
    "grid that differs from the stored rotary table": (
        edit_llamagen(lambda w: w.update(ROTARY_TABLE)),
        "block_size",
        "a grid of 4 5",
    ),
    "grid that differs from the grid option": (
        lambda folder: read_llamagen_transformer(C2I, config=config_path(C2I), grid=7),
        "block_size",
        "a grid of 4 7",
    ),
    "grid above the maximum": (edit_llamagen(block_size=10**60), "grid", "1 to 256"),
    "missing grid": (edit_llamagen(block_size=None), "grid", "do not show 16 (256 pixels)"),
    "missing number of heads": (
        lambda folder: read_llamagen_transformer(Path(shutil.copy(C2I, folder))),
        C2I.name,
        "do not show the number of heads",
    ),
    "image tokenizer as target": (
        lambda folder: read_llamagen_transformer(VQ),
        VQ.name,
        "decoder.conv_blocks.0.attn.0.k.bias",
    ),
    "target as image tokenizer": (
        lambda folder: read_llamagen_vq(C2I),
        C2I.name,
        "cls_embedding.embedding_table.weight quantize.embedding.weight",
    ),
    "image tokenizer without an encoder level": (
        lambda folder: read_llamagen_vq(copy_weights(folder, VQ, remove_weights("encoder.conv_blocks.4."))),
        VQ.name,
        "4 encoder and 5 decoder levels",
    ),
    "image tokenizer with fewer codes than the target": (read_small_codebook, "vq", "100 codes 128"),
    # Folders of weights
    "missing shards": (
        lambda folder: Checkpoint(
            remove_files(copy_as_shards(DRAFTER, folder / "shards", "bin"), "pytorch_model-00002-of-00003.bin")
        ).read_weights(),
        "shards",
        "pytorch_model-00002-of-00003.bin pytorch_model.bin.index.json",
    ),
    "shard with the content of another shard": (
        read_wrong_shard,
        "model-00002-of-00003.safetensors",
        "missing: unexpected:",
    ),
    "index with a path outside the folder": (
        write_index({"weight_map": {"a": "../b.safetensors"}}),
        "'a'",
        "../b.safetensors",
    ),
    "index with the path of a folder": (
        write_index({"weight_map": {"a": ".."}}),
        "'a'",
        "the name of a file in its folder",
    ),
    "index without weights": (write_index({"weight_map": {}}), "weight_map", "{}"),
    "weight in two files": (read_duplicate_weights, "b.pt: x", "in an earlier file"),
    "folder without weights": (lambda folder: Checkpoint(folder).read_weights(), "", "no weights model.safetensors"),
    # Drafters
    **{
        f"drafter with an invalid {name}": (edit_drafter(**{name: value}), f"drafter/config.json: {name}", words)
        for name, value, words in (
            ("intermediate_size", 256, "256 128"),
            ("num_attention_heads", 3, "3 a number that divides"),
            ("input_type", "c2i", "'c2i' 't2i' or 't2i2'"),
            ("caption_dim", 2048, "2048 32"),
            ("cls_token_num", 120, "120 8"),
            ("block_size", 256, "256 36"),
            ("rope_scaling", {"type": "linear"}, "linear plain"),
            ("rope_parameters", {"rope_type": "yarn"}, "yarn plain"),
            ("vocab_size", 129, "129 128"),
            ("hidden_act", "gelu", "'gelu' 'silu'"),
            ("num_hidden_layers", 2, "2 1"),
        )
    },
    "drafter with a prefix before all names": (
        edit_drafter(lambda w: [w.update({f"model.{name}": w.pop(name)}) for name in list(w)]),
        "drafter",
        "model.fc.weight fc.weight and embed_tokens.weight",
    ),
    "drafter with another head width": (edit_drafter(head_dim=8), "num_attention_heads", "4"),
    "drafter with another number of key heads": (
        edit_drafter(num_key_value_heads=2),
        "{q,k,v}_proj.weight",
        "192 rows 2 key heads",
    ),
    "text-conditional drafter for a class-conditional target": (
        lambda folder: read_llamagen(C2I, VQ, drafter=DRAFTER, config=config_path(C2I)),
        "input_type",
        "'t2i' 'c2i'",
    ),
    "drafter with another vocabulary size than the target": (
        lambda folder: read_anole(ANOLE, VQGAN, drafter=DRAFTER),
        "embed_tokens.weight",
        "[128, 64] [176, 64]",
    ),
    # Text encoders
    "T5 with ReLU": (
        edit_text_encoder(sizes={"feed_forward_proj": "relu"}),
        "feed_forward_proj",
        "'relu' 'gated-gelu'",
    ),
    "number of T5 position buckets that is not valid": (
        edit_text_encoder(sizes={"relative_attention_num_buckets": 6}),
        "relative_attention_num_buckets",
        "6 buckets for distances up to 128",
    ),
    "T5 head width as text": (edit_text_encoder(d_kv="two"), "t5/config.json", "the configuration of a T5"),
    "T5 with more layers than weights": (edit_text_encoder(num_layers=10**9), "num_layers", "1000000000 2"),
    "T5 with two different token embeddings": (
        edit_text_encoder(lambda w: w.update({"encoder.embed_tokens.weight": w["shared.weight"] + 1})),
        "shared.weight",
        "differs from encoder.embed_tokens.weight",
    ),
    "T5 tokenizer with more tokens than embeddings": (
        edit_text_encoder(sizes={"vocab_size": 50}),
        "token '9'",
        "id 55 at most 49",
    ),
    "T5 tokenizer with another end token": (edit_text_encoder(eos_token_id=5), "last token of a text", "1 5"),
    "text encoder for a class-conditional target": (
        lambda folder: read_llamagen(LANTERN / "c2i", VQ, text_encoder=folder),
        "text_encoder",
        "class-conditional",
    ),
    # Anole
    "Anole without a tokenizer": (
        lambda folder: read_anole(remove_files(copy_checkpoint(ANOLE, folder), "tokenizer.json"), VQGAN),
        "",
        "has no tokenizer.json",
    ),
    "file instead of a folder": (
        lambda folder: read_anole(ANOLE / "model.safetensors", VQGAN),
        "model.safetensors",
        "a file a folder with config.json",
    ),
    "token id above the vocabulary": (
        edit_anole_tokenizer(lambda c: c["model"]["vocab"].update(far=176)),
        "'far'",
        "id 176 at most 175",
    ),
    "swapped token ids": (edit_anole_tokenizer(swap_tokens), "'<racm3:break>'", "id 132 id 133"),
    **{
        f"Anole with an invalid {name}": (edit_anole(**{name: value}), f"target/config.json: {name}", words)
        for name, value, words in (
            ("model_type", "llama", "'llama' 'chameleon'"),
            ("architectures", ["ChameleonXLLMXForConditionalGeneration"], "ChameleonXLLMX family lumina Lumina-mGPT"),
            ("hidden_size", 32, "32 64"),
            ("swin_norm", True, "True False"),
            ("max_position_embeddings", 60, "60 more than the 64"),
            ("vocabulary_map", None, "None token ids by names"),
        )
    },
    "Anole without the tokens around images": (
        edit_anole(vocabulary_map={"<s>": 0}),
        "vocabulary_map",
        "lacks <racm3:break>, <reserved08706>",
    ),
    "Anole without an image token": (
        edit_anole(config=lambda c: [c["vocabulary_map"].pop(n) for n in list(c["vocabulary_map"]) if n == "IMGIMGBZ"]),
        "vocabulary_map",
        "127 image tokens consecutive",
    ),
    "Lumina-mGPT with the family option anole": (
        lambda folder: read_anole(LUMINA, VQGAN),
        "architectures",
        "with mask_image_logits",
    ),
    "tied embeddings beside a head": (edit_anole(tie_word_embeddings=True), "tie_word_embeddings", "True False"),
    "scaled rotary positions": (edit_anole(rope_scaling={"type": "linear"}), "rope_scaling", "'linear' plain"),
    "scaled rotary positions beside plain ones": (
        edit_anole(rope_parameters={"rope_type": "default"}, rope_scaling={"rope_type": "llama3"}),
        "rope_scaling",
        "'llama3' plain",
    ),
    "scaled rotary positions in some layers": (
        edit_anole(rope_parameters={"full_attention": {"rope_type": "yarn"}}),
        "rope_parameters",
        "'yarn' plain",
    ),
    "image tokenizer with another number of codes in the YAML file": (
        replace_vqgan_config((VQGAN / "vqgan.yaml").read_text().replace("n_embed: 128", "n_embed: 64")),
        "vqgan.yaml: n_embed",
        "64 128",
    ),
    "image tokenizer without a YAML file": (replace_vqgan_config(None), "grid", "no .yaml"),
    "grid option that differs from the YAML file": (lambda folder: read_anole(ANOLE, VQGAN, grid=4), "grid", "4 8"),
    "broken YAML": (replace_vqgan_config("model: ["), "vqgan.yaml", "YAML"),
    "YAML file without settings": (
        replace_vqgan_config("model: {params: {embed_dim: 16}}"),
        "ddconfig",
        "settings of the model",
    ),
    # Lumina-mGPT
    "query norm of the wrong shape": (
        edit_lumina(lambda w: w.update({"model.layers.0.self_attn.q_norm.bias": torch.ones(3, 16)})),
        "target",
        "model.layers.0.self_attn.q_norm.bias [3, 16] [4, 16]",
    ),
    "Lumina-mGPT without a grid option": (lambda folder: read_lumina(LUMINA, VQGAN), "grid", "nothing 32, 48 or 64"),
    "Lumina-mGPT with an odd grid": (lambda folder: read_lumina(LUMINA, VQGAN, grid=5), "grid", "5 32, 48 or 64"),
    "Anole with the family option lumina": (
        edit_lumina(config=lambda c: c.pop("mask_image_logits")),
        "architectures",
        "without mask_image_logits family anole",
    ),
    "token id above the embedding table": (
        edit_lumina(config=lambda c: c["vocabulary_map"].update({"<reserved08799>": 600})),
        "model.embed_tokens.weight",
        "518 rows 600",
    ),
    "row-end token before the image tokens": (read_early_row_end, "<reserved08799>", "token 3"),
    # Emu3
    "Emu3 without an image tokenizer": (
        lambda folder: read_emu3(copy_published_emu3(folder)[0], grid=4),
        "vq",
        "nothing Emu3-VisionTokenizer",
    ),
    "Emu3 with two image tokenizers": (lambda folder: read_emu3(EMU3, folder, grid=4), "vq", "none"),
    "other model type than Emu3": (edit_emu3(model_type="llama"), "model_type", "'llama' 'emu3' or 'Emu3'"),
    "Emu3 token with two ids": (
        edit_emu3(config=lambda c: c["vocabulary_map"].update({"<|extra_200|>": 5})),
        "tokenizer.json: token '<|extra_200|>'",
        "id 549 id 5",
    ),
    "Emu3 code with two ids": (
        edit_emu3(config=lambda c: c["vocabulary_map"].update({"<|visual token 000007|>": 5})),
        "tokenizer.json: token '<|visual token 000007|>'",
        "id 564 id 5",
    ),
    "Emu3 without an output head": (
        edit_emu3(remove_weights("text_model.lm_head.")),
        "lm_head.weight",
        "missing weight text_model.model.layers.0.input_layernorm.weight",
    ),
    "Emu3 image tokenizer with the wrong number of taps": (
        edit_emu3(lambda w: w.update({"vqmodel.encoder.time_conv.0.conv.conv.weight": torch.zeros(4, 4, 3, 3, 3)})),
        "vqmodel.encoder.time_conv.0.conv.conv.weight",
        "[4, 4, 3, 3, 3] for 4 frames 4 taps",
    ),
    "duplicate rank in the Emu3 tokenizer": (
        edit_emu3_tokenizer("emu3.tiktoken", lambda text: text.replace("Ig== 1", "Ig== 0")),
        "emu3.tiktoken",
        "each once",
    ),
    "Emu3 visual tokens in the wrong order": (
        edit_emu3_tokenizer("emu3_vision_tokens.txt", lambda text: text.replace("000007", "000700")),
        "emu3.tiktoken",
        "96 visual tokens",
    ),
    "Emu3 without a token for the start of an image": (
        edit_emu3_tokenizer(
            "emu3_vision_tokens.txt", lambda text: text.replace("image start", "start"), boi_token_id=None
        ),
        "emu3.tiktoken",
        "lacks <|image start|>",
    ),
}


@pytest.mark.parametrize("case", INVALID_CHECKPOINTS)
def test_the_error_of_an_invalid_checkpoint_names_the_field_and_the_value(tmp_path: Path, case: str) -> None:
    read, field, words = INVALID_CHECKPOINTS[case]
    error = catch_error(LanternError, read, tmp_path)
    assert error.field.endswith(field)
    message = " ".join((error.problem, error.found, error.expected, error.remedy))
    missing = [word for word in words.split() if word not in message]
    assert not missing, message


def test_the_message_of_a_checkpoint_error_has_the_file_the_field_and_a_remedy(tmp_path: Path) -> None:
    error = catch_error(CheckpointError, edit_drafter(caption_dim=2048), tmp_path)
    config_file = tmp_path / "drafter/config.json"
    assert str(error) == (
        f"{config_file}: caption_dim: found 2048, expected 32; give the drafter that was trained for this target"
    )
