"""Checkpoints that do not fit are rejected: the error names the file, the field or weight, and its value."""

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
    copy_checkpoint,
    copy_json,
    copy_published_emu3,
    copy_sharded,
    copy_weights,
)
from family_readers import read_anole, read_emu3, read_llamagen, read_llamagen_transformer, read_lumina
from refusals import error_of
from small_models import save_t5

from lantern_rt.errors import CheckpointError, LanternError
from lantern_rt.export.checkpoints.folders import Checkpoint
from lantern_rt.export.models.t5 import read_text_encoder
from lantern_rt.export.models.vq_checkpoints import read_llamagen_vq

Read = Callable[[Path], object]  # copies a checkpoint to a folder, changes the copy and reads it


def official(edit: Any = None, **fields: Any) -> Read:
    return lambda folder: read_llamagen_transformer(
        copy_weights(folder, C2I, edit or (lambda weights: None)),
        config=copy_json(config_path(C2I), folder / "config.json", **fields),
    )


def drafter(edit: Any = None, **fields: Any) -> Read:
    return lambda folder: read_llamagen(
        T2I, VQ, drafter=copy_checkpoint(DRAFTER, folder / "drafter", edit, **fields), config=config_path(T2I)
    )


def anole(weights: Any = None, config: Any = None, **fields: Any) -> Read:
    return lambda folder: read_anole(copy_checkpoint(ANOLE, folder / "target", weights, config, **fields), VQGAN)


def lumina(weights: Any = None, config: Any = None, **fields: Any) -> Read:
    return lambda folder: read_lumina(
        copy_checkpoint(LUMINA, folder / "target", weights, config, **fields), VQGAN, grid=4
    )


def emu3(weights: Any = None, config: Any = None, **fields: Any) -> Read:
    return lambda folder: read_emu3(copy_checkpoint(EMU3, folder / "target", weights, config, **fields), grid=4)


def emu3_tokenizer(name: str, edit: Callable[[str], str], **fields: Any) -> Read:
    def read(folder: Path) -> None:
        target, vq = copy_published_emu3(folder)
        (target / name).write_text(edit((target / name).read_text()))
        copy_json(target / "config.json", target / "config.json", **fields)
        read_emu3(target, vq, grid=4)

    return read


def text_encoder(weights: Any = None, sizes: dict[str, Any] | None = None, **fields: Any) -> Read:
    def read(folder: Path) -> None:
        save_t5(folder / "saved", **(sizes or {}))
        read_text_encoder(copy_checkpoint(folder / "saved", folder / "t5", weights, **fields), 32)

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
        Checkpoint(folder).read_weights()

    return read


def tokenizer(edit: Callable[[dict[str, Any]], object]) -> Read:
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
    shards = copy_sharded(LANTERN / "t2i", folder / "shards")
    shutil.copy(shards / "model-00001-of-00003.safetensors", shards / "model-00002-of-00003.safetensors")
    Checkpoint(shards).read_weights()


def read_duplicate_field(folder: Path) -> None:
    (folder / "config.json").write_text('{"n_head": 4, "n_head": 8}')
    read_llamagen_transformer(C2I, config=folder / "config.json")


def read_few_codes(folder: Path) -> None:
    narrow = copy_weights(
        folder, VQ, lambda w: w.update({"quantize.embedding.weight": w["quantize.embedding.weight"][:100]})
    )
    read_llamagen(C2I, narrow, config=config_path(C2I))


def drop(*prefixes: str) -> Callable[[dict[str, Any]], None]:
    def edit(weights: dict[str, Any]) -> None:
        for name in [name for name in weights if name.startswith(prefixes)]:
            del weights[name]

    return edit


def rename(name: str, new_name: str) -> Callable[[dict[str, Any]], None]:
    return lambda weights: weights.update({new_name: weights.pop(name)})


def swap_tokens(content: dict[str, Any]) -> None:
    content["model"]["vocab"] |= {"<racm3:break>": 132, "<eoss>": 133}
    content["added_tokens"] = []


def read_early_row_end(folder: Path) -> None:
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


FREQUENCIES = {"freqs_cis": torch.zeros(1 + 25, 8, 2)}

# By name: function that reads the checkpoint, end of the field at fault, words of the error.
WRONG_CHECKPOINTS: dict[str, tuple[Read, str, str]] = {
    # LlamaGen's official files
    "another width": (official(dim=128), "config.json: dim", "128 64"),
    "another condition": (official(model_type="t2i"), "config.json: model_type", "'t2i' 'c2i'"),
    "odd heads": (official(n_head=5), "config.json: n_head", "5 a number that divides the width 64"),
    "heads in words": (official(n_head="four"), "config.json: n_head", "'four' a whole number"),
    "narrow heads": (official(n_head=32), "config.json: n_head", "a multiple of 4"),
    "other key heads": (official(n_kv_head=2), "layers.0.attention.wqkv.weight", "192 rows 4 heads of 16"),
    "no square": (official(block_size=17), "config.json: block_size", "17 codes a square grid"),
    "no small number": (official(norm_eps=0), "config.json: norm_eps", "0 a positive number"),
    "a large number": (official(norm_eps=1e308), "config.json: norm_eps", "1e+308 number up to 3.4e+38"),
    "an unknown field": (official(n_heads=4), "config.json: n_heads", "unknown field block_size, caption_dim n_head,"),
    "another feed-forward width": (official(multiple_of=96), "config.json: multiple_of", "96 170 256"),
    "a field twice": (read_duplicate_field, "config.json", "'n_head' twice, with two values"),
    "weights of no kind": (lambda folder: read_llamagen(C2I, VQ, weights="best"), "weights", "'best' model or ema"),
    "a missing weight": (
        official(rename("layers.1.attention.wo.weight", "layers.1.extra")),
        C2I.name,
        "missing: layers.1.attention.wo.weight unexpected: layers.1.extra",
    ),
    "another shape": (official(lambda w: w.update({"norm.weight": torch.ones(63)})), C2I.name, "norm.weight [63] [64]"),
    "a grid that positions contradict": (official(lambda w: w.update(FREQUENCIES)), "block_size", "a grid of 4 5"),
    "a grid that the caller contradicts": (
        lambda folder: read_llamagen_transformer(C2I, config=config_path(C2I), grid=7),
        "block_size",
        "a grid of 4 7",
    ),
    "a grid far too large": (official(block_size=10**60), "grid", "1 to 256"),
    "no grid": (official(block_size=None), "grid", "do not show 16 (256 pixels)"),
    "no heads": (
        lambda folder: read_llamagen_transformer(Path(shutil.copy(C2I, folder))),
        C2I.name,
        "do not show the number of heads",
    ),
    "a VQ tokenizer for a target": (
        lambda folder: read_llamagen_transformer(VQ),
        VQ.name,
        "but decoder.conv_blocks.0.attn.0.k.bias",
    ),
    "a target for a VQ tokenizer": (lambda folder: read_llamagen_vq(C2I), C2I.name, "has no quantize.embedding.weight"),
    "a missing level": (
        lambda folder: read_llamagen_vq(copy_weights(folder, VQ, drop("encoder.conv_blocks.4."))),
        VQ.name,
        "4 encoder and 5 decoder levels",
    ),
    "a VQ tokenizer of other codes": (read_few_codes, "vq", "100 codes 128"),
    # Folders of weights
    "missing shards": (
        lambda folder: Checkpoint(
            remove_files(copy_sharded(DRAFTER, folder / "shards", "bin"), "pytorch_model-00002-of-00003.bin")
        ).read_weights(),
        "shards",
        "pytorch_model-00002-of-00003.bin pytorch_model.bin.index.json",
    ),
    "a shard of another place": (read_wrong_shard, "model-00002-of-00003.safetensors", "missing: unexpected:"),
    "an index to elsewhere": (index({"weight_map": {"a": "../b.safetensors"}}), "'a'", "../b.safetensors"),
    "an index to a folder": (index({"weight_map": {"a": ".."}}), "'a'", "the name of a file in its folder"),
    "an empty index": (index({"weight_map": {}}), "weight_map", "{}"),
    "a weight twice": (read_duplicate_weights, "b.pt: x", "in an earlier file"),
    "no weights": (lambda folder: Checkpoint(folder).read_weights(), "", "no weights model.safetensors"),
    # Drafters
    **{
        f"a drafter's {name}": (drafter(**{name: value}), f"drafter/config.json: {name}", words)
        for name, value, words in (
            ("intermediate_size", 256, "256 128"),
            ("num_attention_heads", 3, "3 a number that divides"),
            ("input_type", "c2i", "'c2i' 't2i' or 't2i2'"),
            ("caption_dim", 2048, "2048 32"),
            ("cls_token_num", 120, "120 8"),
            ("block_size", 256, "256 36"),
            ("rope_scaling", {"type": "linear"}, "linear none"),
            ("vocab_size", 129, "129 128"),
            ("hidden_act", "gelu", "'gelu' 'silu'"),
            ("num_hidden_layers", 2, "2 1"),
        )
    },
    "a drafter's head width": (drafter(head_dim=8), "num_attention_heads", "4"),
    "a drafter's key heads": (drafter(num_key_value_heads=2), "{q,k,v}_proj.weight", "192 rows 2 key heads"),
    "a drafter of texts for classes": (
        lambda folder: read_llamagen(C2I, VQ, drafter=DRAFTER, config=config_path(C2I)),
        "input_type",
        "'t2i' 'c2i'",
    ),
    "a drafter of another vocabulary": (
        lambda folder: read_anole(ANOLE, VQGAN, drafter=DRAFTER),
        "embed_tokens.weight",
        "[128, 64] [176, 64]",
    ),
    # Text encoders
    "another T5": (text_encoder(sizes={"feed_forward_proj": "relu"}), "feed_forward_proj", "'relu' 'gated-gelu'"),
    "odd buckets": (
        text_encoder(sizes={"relative_attention_num_buckets": 6}),
        "relative_attention_num_buckets",
        "6 buckets for distances up to 128",
    ),
    "a T5's head width": (text_encoder(d_kv="two"), "t5/config.json", "the configuration of a T5"),
    "a T5 of too many layers": (text_encoder(num_layers=10**9), "num_layers", "1000000000 2"),
    "two tables of tokens": (
        text_encoder(lambda w: w.update({"encoder.embed_tokens.weight": w["shared.weight"] + 1})),
        "shared.weight",
        "differs from encoder.embed_tokens.weight",
    ),
    "a tokenizer of more tokens": (text_encoder(sizes={"vocab_size": 50}), "token '9'", "id 55 at most 49"),
    "a tokenizer of other ends": (text_encoder(eos_token_id=5), "last token of a text", "1 5"),
    "a text encoder for classes": (
        lambda folder: read_llamagen(LANTERN / "c2i", VQ, text_encoder=folder),
        "text_encoder",
        "class-conditional",
    ),
    # Anole
    "no tokenizer": (
        lambda folder: read_anole(remove_files(copy_checkpoint(ANOLE, folder), "tokenizer.json"), VQGAN),
        "",
        "has no tokenizer.json",
    ),
    "a file for a folder": (
        lambda folder: read_anole(ANOLE / "model.safetensors", VQGAN),
        "model.safetensors",
        "a file a folder with config.json",
    ),
    "a far token": (tokenizer(lambda c: c["model"]["vocab"].update(far=176)), "'far'", "id 176 at most 175"),
    "a token elsewhere": (tokenizer(swap_tokens), "'<racm3:break>'", "id 132 id 133"),
    **{
        f"Anole's {name}": (anole(**{name: value}), f"target/config.json: {name}", words)
        for name, value, words in (
            ("model_type", "llama", "'llama' 'chameleon'"),
            ("architectures", ["ChameleonXLLMXForConditionalGeneration"], "ChameleonXLLMX family lumina Lumina-mGPT"),
            ("hidden_size", 32, "32 64"),
            ("swin_norm", True, "True False"),
            ("max_position_embeddings", 60, "60 more than the 64"),
            ("vocabulary_map", None, "None token ids by names"),
        )
    },
    "Anole's tokens": (anole(vocabulary_map={"<s>": 0}), "vocabulary_map", "lacks <racm3:break>, <reserved08706>"),
    "Anole's codes": (
        anole(config=lambda c: [c["vocabulary_map"].pop(n) for n in list(c["vocabulary_map"]) if n == "IMGIMGBZ"]),
        "vocabulary_map",
        "127 image tokens consecutive",
    ),
    "Lumina as Anole": (lambda folder: read_anole(LUMINA, VQGAN), "architectures", "with mask_image_logits"),
    "stretched positions": (anole(rope_scaling={"type": "linear"}), "rope_parameters", "'linear' plain"),
    "a VQGAN of other codes": (
        vqgan((VQGAN / "vqgan.yaml").read_text().replace("n_embed: 128", "n_embed: 64")),
        "vqgan.yaml: n_embed",
        "64 128",
    ),
    "no size of pictures": (vqgan(None), "grid", "no .yaml"),
    "another size of pictures": (lambda folder: read_anole(ANOLE, VQGAN, grid=4), "grid", "4 8"),
    "broken YAML": (vqgan("model: ["), "vqgan.yaml", "YAML"),
    "an empty YAML": (vqgan("model: {params: {embed_dim: 16}}"), "ddconfig", "the model's settings"),
    # Lumina-mGPT
    "odd norms": (
        lumina(lambda w: w.update({"model.layers.0.self_attn.q_norm.bias": torch.ones(3, 16)})),
        "target",
        "model.layers.0.self_attn.q_norm.bias [3, 16] [4, 16]",
    ),
    "no grid of patches": (lambda folder: read_lumina(LUMINA, VQGAN), "grid", "nothing 32, 48 or 64"),
    "half a patch": (lambda folder: read_lumina(LUMINA, VQGAN, grid=5), "grid", "5 32, 48 or 64"),
    "Anole as Lumina": (
        lumina(config=lambda c: c.pop("mask_image_logits")),
        "architectures",
        "without mask_image_logits family anole",
    ),
    "a token without a row": (
        lumina(config=lambda c: c["vocabulary_map"].update({"<reserved08799>": 600})),
        "model.embed_tokens.weight",
        "518 rows 600",
    ),
    "an end of row before the codes": (read_early_row_end, "<reserved08799>", "token 3"),
    # Emu3
    "no image tokenizer": (
        lambda folder: read_emu3(copy_published_emu3(folder)[0], grid=4),
        "vq",
        "nothing Emu3-VisionTokenizer",
    ),
    "two image tokenizers": (lambda folder: read_emu3(EMU3, folder, grid=4), "vq", "none"),
    "no Emu3": (emu3(model_type="llama"), "model_type", "'llama' 'emu3' or 'Emu3'"),
    "Emu3's tokens": (
        emu3(config=lambda c: c["vocabulary_map"].update({"<|extra_200|>": 5})),
        "tokenizer.json: token '<|extra_200|>'",
        "id 549 id 5",
    ),
    "Emu3's head": (emu3(drop("text_model.lm_head.")), "lm_head.weight", "missing weight"),
    "Emu3's frames": (
        emu3(lambda w: w.update({"vqmodel.encoder.time_conv.0.conv.conv.weight": torch.zeros(4, 4, 3, 3, 3)})),
        "vqmodel.encoder.time_conv.0.conv.conv.weight",
        "[4, 4, 3, 3, 3] for 4 frames 4 taps",
    ),
    "a rank twice": (
        emu3_tokenizer("emu3.tiktoken", lambda text: text.replace("Ig== 1", "Ig== 0")),
        "emu3.tiktoken",
        "each once",
    ),
    "visual tokens out of order": (
        emu3_tokenizer("emu3_vision_tokens.txt", lambda text: text.replace("000007", "000700")),
        "emu3.tiktoken",
        "96 visual tokens",
    ),
    "no begin of image": (
        emu3_tokenizer("emu3_vision_tokens.txt", lambda text: text.replace("image start", "start"), boi_token_id=None),
        "emu3.tiktoken",
        "lacks <|image start|>",
    ),
}


@pytest.mark.parametrize("case", WRONG_CHECKPOINTS)
def test_a_checkpoint_that_does_not_fit_is_rejected_by_its_field(tmp_path: Path, case: str) -> None:
    read, field, words = WRONG_CHECKPOINTS[case]
    error = error_of(LanternError, read, tmp_path)
    assert error.field.endswith(field)
    message = " ".join((error.problem, error.found, error.expected, error.remedy))
    missing = [word for word in words.split() if word not in message]
    assert not missing, message


def test_an_error_is_a_sentence_with_file_field_and_remedy(tmp_path: Path) -> None:
    error = error_of(CheckpointError, drafter(caption_dim=2048), tmp_path)
    config_file = tmp_path / "drafter/config.json"
    assert str(error) == (
        f"{config_file}: caption_dim: found 2048, expected 32; give the drafter that was trained for this target"
    )
