"""Errors of invalid checkpoints: the message names the file, the field or weight, and the invalid value."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_copies import (
    ANOLE,
    C2I,
    DRAFTER,
    LANTERN,
    VQ,
    VQGAN,
    config_path,
    copy_as_shards,
    copy_weights,
)
from edited_checkpoints import (
    Reader,
    edit_drafter,
    edit_groups,
    edit_llamagen,
    edit_text_encoder,
    read_duplicate_field,
    read_duplicate_weights,
    read_groups_with_code,
    read_small_codebook,
    read_wrong_shard,
    remove_files,
    remove_weights,
    rename_weight,
    write_index,
)
from family_readers import (
    read_anole,
    read_llamagen,
    read_llamagen_transformer,
)
from invalid_families import INVALID_FAMILIES
from refusals import catch_error

from lantern_rt.errors import CheckpointError, LanternError
from lantern_rt.export.checkpoints.folders import Checkpoint
from lantern_rt.export.models.vq_checkpoints import read_llamagen_vq

ROTARY_TABLE = {"freqs_cis": torch.zeros(1 + 25, 8, 2)}  # one prefix position and 5 x 5 cells
PYTORCH_SHARD = "pytorch_model-00002-of-00003.bin"
SHARD = "model-00002-of-00003.safetensors"

# By name: function that reads the checkpoint, last part of the invalid field's name, words of the message.
INVALID_CHECKPOINTS: dict[str, tuple[Reader, str, str]] = {
    # LlamaGen's official files
    "width unlike the weights": (edit_llamagen(dim=128), "config.json: dim", "128 64"),
    "text condition for classes": (edit_llamagen(model_type="t2i"), "config.json: model_type", "'t2i' 'c2i'"),
    "undividable width": (edit_llamagen(n_head=5), "config.json: n_head", "5 a number that divides the width 64"),
    "heads as text": (edit_llamagen(n_head="four"), "config.json: n_head", "'four' a whole number"),
    "head width not a multiple of 4": (edit_llamagen(n_head=32), "config.json: n_head", "a multiple of 4"),
    "key heads": (edit_llamagen(n_kv_head=2), "layers.0.attention.wqkv.weight", "192 rows 4 heads of 16"),
    "non-square grid": (edit_llamagen(block_size=17), "config.json: block_size", "17 codes a square number"),
    "norm epsilon of zero": (edit_llamagen(norm_eps=0), "config.json: norm_eps", "0 a positive number"),
    "large norm epsilon": (edit_llamagen(norm_eps=1e308), "config.json: norm_eps", "1e+308 number up to 3.4e+38"),
    "unknown field": (
        edit_llamagen(n_heads=4),
        "config.json: n_heads",
        "unknown field block_size, caption_dim n_head,",
    ),
    "feed-forward width": (edit_llamagen(multiple_of=96), "config.json: multiple_of", "96 170 256"),
    "duplicate field": (read_duplicate_field, "config.json", "the key 'n_head' twice, with different values"),
    "unknown weights": (lambda folder: read_llamagen(C2I, VQ, weights="best"), "weights", "'best' model or ema"),
    "missing weight": (
        edit_llamagen(rename_weight("layers.1.attention.wo.weight", "layers.1.extra")),
        C2I.name,
        "missing: layers.1.attention.wo.weight unexpected: layers.1.extra",
    ),
    "norm of the wrong shape": (
        edit_llamagen(lambda w: w.update({"norm.weight": torch.ones(63)})),
        C2I.name,
        "norm.weight [63] [64]",
    ),
    "grid unlike the rotary table": (edit_llamagen(lambda w: w.update(ROTARY_TABLE)), "block_size", "a grid of 4 5"),
    "grid unlike the grid option": (
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
    "fewer codes than the target": (read_small_codebook, "vq", "100 codes 128"),
    "rotary table of another shape": (
        edit_llamagen(lambda w: w.update(freqs_cis=torch.tensor(1.0))),
        "freqs_cis",
        "shape [] 3 sizes",
    ),
    **{
        f"boolean {name}": (
            edit_llamagen(lambda w, name=name: w.update({name: w[name] > 0})),
            field,
            "bool numbers floating-point numbers",
        )
        for name, field in (
            ("output.weight", ""),
            ("tok_embeddings.weight", "tok_embeddings.weight"),
            ("cls_embedding.embedding_table.weight", "embedding_table.weight"),
        )
    },
    # NAR and PAR
    "NAR without a grid": (edit_groups("nar", grid=None), "grid", "the weights do not show the grid of codes"),
    "NAR of 65 rows": (edit_groups("nar", grid=65), "grid", "65 x 65 codes at most 64 rows"),
    "NAR from LlamaGen": (edit_groups("nar", target=C2I), "output.weight", "missing weight"),
    "NAR of 3 layers": (edit_groups("nar", n_layer=3), "n_layer", "3 2"),
    "NAR of two attentions": (edit_groups("nar", medusa_attention_num=2), "medusa_attention_num", "2 1"),
    "NAR of Medusa heads": (edit_groups("nar", medusa_heads=1), "medusa_heads", "unknown field"),
    "NAR as LlamaGen": (edit_groups("llamagen", source="nar"), "", "unexpected: medusa_norm"),
    "NAR with code": (read_groups_with_code("nar"), "", "holds more than tensors"),
    "PAR of 5 x 5 codes": (edit_groups("par", grid=5), "grid", "5 x 5 codes a larger grid that divides into 4 regions"),
    "PAR of 2 x 2 codes": (edit_groups("par", grid=2), "grid", "2 x 2 codes a larger grid"),
    "PAR without a grid": (edit_groups("par", grid=None), "grid", "the weights do not show the grid of codes"),
    "PAR from LlamaGen": (edit_groups("par", target=C2I), "spe_tok_embeddings.special_embeddings.weight", ""),
    "PAR of 16 tokens": (edit_groups("par", ar_token_num=16), "ar_token_num", "16 4"),
    "PAR of 15 special tokens": (edit_groups("par", spe_token_num=15), "spe_token_num", "15 3"),
    "PAR with an unknown field": (edit_groups("par", par=1), "par", "unknown field"),
    "PAR as LlamaGen": (edit_groups("llamagen", source="par"), "", "unexpected: spe_tok_embeddings"),
    "PAR with code": (read_groups_with_code("par"), "", "holds more than tensors"),
    # Folders of weights
    "missing shards": (
        lambda folder: Checkpoint(
            remove_files(copy_as_shards(DRAFTER, folder / "shards", "bin"), PYTORCH_SHARD)
        ).read_weights(),
        "shards",
        f"{PYTORCH_SHARD} pytorch_model.bin.index.json",
    ),
    "shard with another's content": (read_wrong_shard, SHARD, "missing: unexpected:"),
    "shards without an index": (
        lambda folder: Checkpoint(
            remove_files(copy_as_shards(LANTERN / "t2i", folder / "shards"), "model.safetensors.index.json")
        ).read_weights(),
        "shards",
        f"model-00001-of-00003.safetensors, {SHARD}, model-00003-of-00003.safetensors without an index",
    ),
    "path outside the folder": (write_index({"weight_map": {"a": "../b.safetensors"}}), "'a'", "../b.safetensors"),
    "path of a folder": (write_index({"weight_map": {"a": ".."}}), "'a'", "the name of a file in its folder"),
    "index without weights": (write_index({"weight_map": {}}), "weight_map", "{}"),
    "weight in two files": (read_duplicate_weights, "b.pt: x", "in an earlier file"),
    "folder without weights": (lambda folder: Checkpoint(folder).read_weights(), "", "no weights model.safetensors"),
    # Drafters
    **{
        f"drafter's {name}": (edit_drafter(**{name: value}), f"drafter/config.json: {name}", words)
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
    "drafter's head width": (edit_drafter(head_dim=8), "num_attention_heads", "4"),
    "drafter's key heads": (edit_drafter(num_key_value_heads=2), "{q,k,v}_proj.weight", "192 rows 2 key heads"),
    "text drafter for classes": (
        lambda folder: read_llamagen(C2I, VQ, drafter=DRAFTER, config=config_path(C2I)),
        "input_type",
        "'t2i' 'c2i'",
    ),
    "drafter of another vocabulary": (
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
    "T5 with few position buckets": (
        edit_text_encoder(sizes={"relative_attention_num_buckets": 6}),
        "relative_attention_num_buckets",
        "6 buckets for distances up to 128",
    ),
    "T5 head width as text": (edit_text_encoder(d_kv="two"), "t5/config.json", "the configuration of a T5"),
    "T5 of many layers": (edit_text_encoder(num_layers=10**9), "num_layers", "1000000000 2"),
    "T5 of two token embeddings": (
        edit_text_encoder(lambda w: w.update({"encoder.embed_tokens.weight": w["shared.weight"] + 1})),
        "shared.weight",
        "differs from encoder.embed_tokens.weight",
    ),
    "T5 with few embeddings": (edit_text_encoder(sizes={"vocab_size": 50}), "token '9'", "id 55 at most 49"),
    "T5 with another end token": (edit_text_encoder(eos_token_id=5), "last token of a text", "1 5"),
    "text encoder for classes": (
        lambda folder: read_llamagen(LANTERN / "c2i", VQ, text_encoder=folder),
        "text_encoder",
        "class-conditional",
    ),
}
INVALID_CHECKPOINTS |= INVALID_FAMILIES


@pytest.mark.parametrize("case", INVALID_CHECKPOINTS)
def test_invalid_checkpoints_are_rejected_by_field_and_value(tmp_path: Path, case: str) -> None:
    read, field, words = INVALID_CHECKPOINTS[case]
    error = catch_error(LanternError, read, tmp_path)
    assert error.field.endswith(field)
    message = " ".join((error.problem, error.found, error.expected, error.remedy))
    missing = [word for word in words.split() if word not in message]
    assert not missing, message
    assert "\n" not in str(error)


def test_a_checkpoint_errors_message_has_file_field_and_remedy(tmp_path: Path) -> None:
    error = catch_error(CheckpointError, edit_drafter(caption_dim=2048), tmp_path)
    config_file = tmp_path / "drafter/config.json"
    assert str(error) == (
        f"{config_file}: caption_dim: found 2048, expected 32; give the drafter that was trained for this target"
    )
