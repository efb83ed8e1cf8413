"""Errors of invalid checkpoints: the message names the file, the field or weight, and the invalid value."""

from __future__ import annotations

import shutil
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
    EMU35,
    EMU35_VQ,
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
    VQ,
    VQGAN,
    config_path,
    copy_as_shards,
    copy_checkpoint,
    copy_published_emu3,
    copy_weights,
)
from edited_checkpoints import (
    LFS_POINTER,
    NESTED_ALIASES,
    READERS,
    Reader,
    convert_to_booleans,
    copy_vq_file,
    edit,
    edit_drafter,
    edit_gear,
    edit_glm,
    edit_groups,
    edit_json,
    edit_llamagen,
    edit_prologue,
    edit_published_emu3,
    edit_rar,
    edit_text_encoder,
    read_duplicate_field,
    read_duplicate_weights,
    read_early_row_end,
    read_groups_with_code,
    read_metas_layout,
    read_small_codebook,
    read_wrong_shard,
    remove_files,
    remove_weights,
    rename_weight,
    replace_vqgan_config,
    swap_tokens,
    write_index,
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
from refusals import catch_error

from lantern_rt.errors import CheckpointError, LanternError
from lantern_rt.export.checkpoints.files import read_config, read_tokenizer, read_weights
from lantern_rt.export.checkpoints.folders import Checkpoint
from lantern_rt.export.models.t5 import read_text_encoder
from lantern_rt.export.models.vq_checkpoints import read_llamagen_vq

ROTARY_TABLE = {"freqs_cis": torch.zeros(1 + 25, 8, 2)}  # one prefix position and 5 x 5 cells
PYTORCH_SHARD = "pytorch_model-00002-of-00003.bin"
SHARD = "model-00002-of-00003.safetensors"
YAML = (VQGAN / "vqgan.yaml").read_text()
EMBEDDINGS = "embeddings.weight"
NORM = "attn.q_norm.weight"
MODULATION = "adaln_before_head.adaLN_modulation.1.weight"
EMBED = "model.embed_tokens.weight"
TIME_CONV = "vqmodel.encoder.time_conv.0.conv.conv.weight"
QUERY_NORM = "model.layers.0.self_attn.q_norm.bias"
PROLOGUE_CODES = "semantic_emb.weight"
KEY_BIAS = "model.layers.1.self_attn.k_proj.bias"
GLM_CONFIG = "vision_language_encoder/config.json"
GLM_PROCESSOR = "processor/processor_config.json"
GLM_TOKENIZER = "processor/tokenizer.json"

# Function that reads the checkpoint, last part of the invalid field's name, words of the message.
INVALID_CHECKPOINTS: list[tuple[Reader, str, str]] = [
    # LlamaGen's official files
    (edit_llamagen(dim=128), "config.json: dim", "128 64"),
    (edit_llamagen(model_type="t2i"), "config.json: model_type", "'t2i' 'c2i'"),
    (edit_llamagen(n_head=5), "config.json: n_head", "5 a number that divides the width 64"),
    (edit_llamagen(n_head="four"), "config.json: n_head", "'four' a whole number"),
    (edit_llamagen(n_head=32), "config.json: n_head", "a multiple of 4"),
    (edit_llamagen(n_kv_head=2), "layers.0.attention.wqkv.weight", "192 rows 4 heads of 16"),
    (edit_llamagen(block_size=17), "config.json: block_size", "17 codes a square number"),
    (edit_llamagen(norm_eps=0), "config.json: norm_eps", "0 a positive number"),
    (edit_llamagen(norm_eps=1e308), "config.json: norm_eps", "1e+308 number up to 3.4e+38"),
    (edit_llamagen(n_heads=4), "config.json: n_heads", "unknown field block_size, caption_dim n_head,"),
    (edit_llamagen(multiple_of=96), "config.json: multiple_of", "96 170 192 256"),
    (read_duplicate_field, "config.json", "the key 'n_head' twice, with different values"),
    (lambda folder: read_llamagen(C2I, VQ, weights="best"), "weights", "'best' model or ema"),
    (
        edit_llamagen(rename_weight("layers.1.attention.wo.weight", "layers.1.extra")),
        C2I.name,
        "missing: unexpected: layers.1.extra",
    ),
    (edit_llamagen(lambda w: w.update({"norm.weight": torch.ones(63)})), C2I.name, "norm.weight [63] [64]"),
    (edit_llamagen(lambda w: w.update(ROTARY_TABLE)), "block_size", "a grid of 4 5"),
    (lambda folder: read_llamagen_transformer(C2I, config=config_path(C2I), grid=7), "block_size", "a grid of 4 7"),
    (edit_llamagen(block_size=10**60), "grid", "1 to 256"),
    (edit_llamagen(block_size=None), "grid", "do not show 16 (256 pixels)"),
    (lambda folder: read_llamagen_transformer(Path(shutil.copy(C2I, folder))), C2I.name, "the number of heads"),
    (lambda folder: read_llamagen_transformer(VQ), VQ.name, "decoder.conv_blocks.0.attn.0.k.bias"),
    (lambda folder: read_llamagen_vq(C2I), C2I.name, "cls_embedding.embedding_table.weight quantize.embedding.weight"),
    (
        lambda folder: read_llamagen_vq(copy_weights(folder, VQ, remove_weights("encoder.conv_blocks.4."))),
        VQ.name,
        "4 encoder and 5 decoder levels",
    ),
    (read_small_codebook, "vq", "100 codes 128"),
    (edit_llamagen(lambda w: w.update(freqs_cis=torch.tensor(1.0))), "freqs_cis", "shape [] 3 sizes"),
    (edit_llamagen(convert_to_booleans("output.weight")), "", "bool floating-point numbers"),
    (edit_llamagen(convert_to_booleans("tok_embeddings.weight")), "tok_embeddings.weight", "bool"),
    (edit_llamagen(convert_to_booleans("cls_embedding.embedding_table.weight")), "embedding_table.weight", "bool"),
    # GEAR-T2I
    (edit_gear(text_attn="prefix"), "text_attn", "'prefix' 'causal'"),
    (edit_gear(cls_token_num=None), "cls_token_num", "the number of text tokens"),
    (edit_gear(remove_weights("layers.1.attention.wo_text")), "", "layers.1.attention.wo_text.weight first 2 layers"),
    (
        edit_gear(lambda w: w.update({"layers.2.attention_norm_text.weight": w["norm.weight"]})),
        "",
        "layers.2.attention_norm_text.weight first 2 layers",
    ),
    (
        edit_gear(lambda w: w.update({"layers.0.attention.wo_text.weight": w["output.weight"]})),
        "",
        "layers.0.attention.wo_text.weight has shape [128, 40], expected [40, 40]",
    ),
    (lambda folder: read_gear(C2I, **GEAR_FILES | {"config": config_path(C2I)}), "", "class-conditional"),
    (edit(QWEN3, hidden_size=64), "hidden_size", "64 32, the width"),
    (edit(QWEN3, model_type="qwen2"), "model_type", "'qwen2' 'qwen3' Qwen/Qwen3-1.7B"),
    (edit(QWEN3, use_sliding_window=True), "use_sliding_window", "True False"),
    (edit(QWEN3, rope_scaling={"rope_type": "yarn"}), "rope_scaling", "plain positions"),
    (edit(QWEN3, files={"tokenizer_config.json": edit_json(lambda c: c.update(padding_side="left"))}), "side", "right"),
    (edit(QWEN3, files={"tokenizer_config.json": edit_json(lambda c: c.pop("pad_token"))}), "pad_token", "a token of"),
    (edit(QWEN3, without="tokenizer_config.json"), "target", "tokenizer_config.json"),
    (edit(QWEN3, remove_weights("model.norm.")), "", "missing: model.norm.weight"),
    # NAR and PAR
    (edit_groups("nar", grid=None), "grid", "the weights do not show the grid of codes"),
    (edit_groups("nar", grid=65), "grid", "65 x 65 codes at most 64 rows"),
    (edit_groups("nar", target=C2I), "output.weight", "missing weight"),
    (edit_groups("nar", n_layer=3), "n_layer", "3 2"),
    (edit_groups("nar", medusa_attention_num=2), "medusa_attention_num", "2 1"),
    (edit_groups("nar", medusa_heads=1), "medusa_heads", "unknown field"),
    (edit_groups("llamagen", source="nar"), "", "unexpected: medusa_norm"),
    (read_groups_with_code("nar"), "", "holds more than tensors"),
    (edit_groups("par", grid=5), "grid", "5 x 5 codes a larger grid that divides into 4 regions"),
    (edit_groups("par", grid=2), "grid", "2 x 2 codes a larger grid"),
    (edit_groups("par", grid=None), "grid", "the weights do not show the grid of codes"),
    (edit_groups("par", target=C2I), "spe_tok_embeddings.special_embeddings.weight", ""),
    (edit_groups("par", ar_token_num=16), "ar_token_num", "16 4"),
    (edit_groups("par", spe_token_num=15), "spe_token_num", "15 3"),
    (edit_groups("par", par=1), "par", "unknown field"),
    (edit_groups("llamagen", source="par"), "", "unexpected: spe_tok_embeddings"),
    (read_groups_with_code("par"), "", "holds more than tensors"),
    # RAR
    (edit_rar(lambda w: w.update(pos_embed=w["pos_embed"][:, 1:])), RAR.name, "tables for [15, 16] codes"),
    (edit_rar(lambda w: w.update({EMBEDDINGS: w[EMBEDDINGS][:130]})), RAR.name, "130 embeddings, 128 codes"),
    (edit_rar(lambda w: w.update({f"blocks.0.{NORM}": torch.ones(5)})), RAR.name, "heads of 5 that divide 32"),
    (edit_rar(lambda w: w.update({f"blocks.1.{NORM}": torch.ones(5)})), f"blocks.1.{NORM}", "shape [5] [16]"),
    (edit_rar(remove_weights("blocks.2.norm1.bias")), "blocks.2.norm1.bias", "missing weight"),
    (edit_rar(remove_weights("blocks.2.mlp.fc1.bias")), RAR.name, "missing: blocks.2.mlp.fc1.bias"),
    (edit_rar(remove_weights("cls_token")), "cls_token", "missing weight"),
    (edit_rar(remove_weights("pos_embed")), RAR.name, "adaln_before_head a RAR transformer, with lm_head, pos_embed"),
    (edit_rar(lambda w: w.update({MODULATION: w[MODULATION][:32]})), MODULATION, "shape [32, 32] [64, 32]"),
    (edit_rar(lambda w: w.update(extra=torch.ones(1))), RAR.name, "unexpected: extra"),
    (edit_rar(remove_weights("decoder.up.1"), MASKGIT_VQ), MASKGIT_VQ.name, "2 encoder and 1 decoder levels"),
    (edit_rar(remove_weights("encoder.mid"), MASKGIT_VQ), MASKGIT_VQ.name, "missing: encoder.mid.0.conv1.weight"),
    (lambda folder: read_rar(C2I, MASKGIT_VQ), C2I.name, "cls_embedding.embedding_table.weight a RAR transformer"),
    # Folders of weights
    (
        lambda folder: Checkpoint(
            remove_files(copy_as_shards(DRAFTER, folder / "shards", "bin"), PYTORCH_SHARD)
        ).read_weights(),
        "shards",
        f"{PYTORCH_SHARD} pytorch_model.bin.index.json",
    ),
    (read_wrong_shard, SHARD, "missing: unexpected:"),
    (
        lambda folder: Checkpoint(
            remove_files(copy_as_shards(LANTERN / "t2i", folder / "shards"), "model.safetensors.index.json")
        ).read_weights(),
        "shards",
        f"model-00001-of-00003.safetensors, {SHARD}, model-00003-of-00003.safetensors without an index",
    ),
    *(
        (write_index({"weight_map": {"x": "model-1.safetensors", "y": name}}), "index.json: 'y'", repr(name))
        for name in ("*", "model-[0-9].safetensors", ".hidden", "a/b", "a\\b", "-rf", "", "..", 7)
    ),
    (write_index({"weight_map": {}}), "weight_map", "{}"),
    (read_duplicate_weights, "b.pt: x", "in an earlier file"),
    (lambda folder: Checkpoint(folder).read_weights(), "", "no weights model.safetensors"),
    # Drafters
    *(
        (edit_drafter(**{name: value}), f"drafter/config.json: {name}", words)
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
    ),
    (
        edit_drafter(lambda w: [w.update({f"model.{name}": w.pop(name)}) for name in list(w)]),
        "drafter",
        "model.fc.weight fc.weight and embed_tokens.weight",
    ),
    (edit_drafter(head_dim=8), "num_attention_heads", "4"),
    (edit_drafter(num_key_value_heads=2), "{q,k,v}_proj.weight", "192 rows 2 key heads"),
    (lambda folder: read_llamagen(C2I, VQ, drafter=DRAFTER, config=config_path(C2I)), "input_type", "'t2i' 'c2i'"),
    (lambda folder: read_anole(ANOLE, VQGAN, drafter=DRAFTER), "embed_tokens.weight", "[128, 64] [176, 64]"),
    # Text encoders
    (edit_text_encoder(sizes={"feed_forward_proj": "relu"}), "feed_forward_proj", "'relu' 'gated-gelu'"),
    (edit_text_encoder(sizes={"relative_attention_num_buckets": 6}), "relative_attention_num_buckets", "6 buckets 128"),
    (edit_text_encoder(d_kv="two"), "t5/config.json", "the configuration of a T5"),
    (edit_text_encoder(num_layers=10**9), "num_layers", "1000000000 2"),
    (
        edit_text_encoder(lambda w: w.update({"encoder.embed_tokens.weight": w["shared.weight"] + 1})),
        "shared.weight",
        "differs from encoder.embed_tokens.weight",
    ),
    (edit_text_encoder(sizes={"vocab_size": 50}), "token '9'", "id 55 at most 49"),
    (edit_text_encoder(eos_token_id=5), "last token of a text", "1 5"),
    (lambda folder: read_llamagen(LANTERN / "c2i", VQ, text_encoder=folder), "text_encoder", "class-conditional"),
    # Anole
    (edit(ANOLE, without="tokenizer.json"), "", "has no tokenizer.json"),
    (lambda folder: read_anole(ANOLE / "model.safetensors", VQGAN), "model.safetensors", "a folder with config.json"),
    (edit(ANOLE, tokenizer=edit_json(lambda c: c["model"]["vocab"].update(far=176))), "'far'", "id 176 at most 175"),
    (edit(ANOLE, tokenizer=edit_json(swap_tokens)), "'<racm3:break>'", "id 132 id 133"),
    *(
        (edit(ANOLE, **{name: value}), f"target/config.json: {name}", words)
        for name, value, words in (
            ("model_type", "llama", "'llama' 'chameleon'"),
            ("architectures", ["ChameleonXLLMXForConditionalGeneration"], "ChameleonXLLMX family lumina Lumina-mGPT"),
            ("hidden_size", 32, "32 64"),
            ("swin_norm", True, "True False"),
            ("max_position_embeddings", 60, "60 more than the 64"),
            ("vocabulary_map", None, "None token ids by names"),
        )
    ),
    (edit(ANOLE, model_type="mamba"), "config.json: model_type", "leloy/Anole-7b-v0.1-hf"),
    (read_metas_layout, "", "Meta's layout leloy/Anole-7b-v0.1-hf"),
    (edit(ANOLE, vocabulary_map={"<s>": 0}), "vocabulary_map", "lacks <racm3:break>, <reserved08706>"),
    (edit(ANOLE, config=lambda c: c["vocabulary_map"].pop("IMGIMGBZ")), "vocabulary_map", "127 image tokens"),
    (lambda folder: read_anole(LUMINA, VQGAN), "architectures", "with mask_image_logits"),
    (edit(ANOLE, tie_word_embeddings=True), "tie_word_embeddings", "True False"),
    (edit(ANOLE, rope_scaling={"type": "linear"}), "rope_scaling", "'linear' plain"),
    (
        edit(ANOLE, rope_parameters={"rope_type": "default"}, rope_scaling={"rope_type": "llama3"}),
        "rope_scaling",
        "'llama3' plain",
    ),
    (edit(ANOLE, rope_parameters={"full_attention": {"rope_type": "yarn"}}), "rope_parameters", "'yarn' plain"),
    (replace_vqgan_config(YAML.replace("n_embed: 128", "n_embed: 64")), "vqgan.yaml: n_embed", "64 128"),
    (replace_vqgan_config(None), "grid", "no .yaml"),
    (lambda folder: read_anole(ANOLE, VQGAN, grid=4), "grid", "4 8"),
    (replace_vqgan_config(LFS_POINTER), "vqgan.yaml", "a Git LFS pointer"),
    (replace_vqgan_config("#" * 20_000), "vqgan.yaml", "more than 16,384 bytes"),
    (replace_vqgan_config("[" * 9000), "vqgan.yaml", "levels deep"),
    (replace_vqgan_config(NESTED_ALIASES), "vqgan.yaml", "YAML aliases"),
    (replace_vqgan_config("model: ["), "vqgan.yaml", "YAML"),
    (replace_vqgan_config("model: {params: {embed_dim: 16}}"), "ddconfig", "settings of the model"),
    # Lumina-mGPT
    (edit(LUMINA, lambda w: w.update({QUERY_NORM: torch.ones(3, 16)})), "target", f"{QUERY_NORM} [3, 16] [4, 16]"),
    (lambda folder: read_lumina(LUMINA, VQGAN), "grid", "nothing 32, 48 or 64"),
    (lambda folder: read_lumina(LUMINA, VQGAN, grid=5), "grid", "5 32, 48 or 64"),
    (edit(LUMINA, config=lambda c: c.pop("mask_image_logits")), "architectures", "without mask_image_logits anole"),
    (edit(LUMINA, tokens={"<reserved08799>": 600}), EMBED, "518 rows 600"),
    (read_early_row_end, "<reserved08799>", "token 3"),
    # Lumina-mGPT 2.0
    (lambda folder: read_lumina2(LUMINA2, MOVQGAN, grid=10), "grid", "10 multiple of 4"),
    (lambda folder: read_lumina2(LUMINA, MOVQGAN, grid=8), "tokenizer.json", "<s> Qwen's family lumina"),
    (edit(LUMINA2, config=lambda c: c.pop("mask_image_logits")), "architectures", "without mask_image_logits"),
    (edit(LUMINA2, vocab_size=None), "vocab_size", "None text 96 tokens"),
    (
        edit(LUMINA2, files={"tokenizer_config.json": lambda text: text.replace("eos_token", "end")}),
        "eos_token",
        "None name",
    ),
    (edit(LUMINA2, tokenizer=lambda text: text.replace("08804>", "04>")), "tokenizer.json", "lacks <reserved08804>"),
    (lambda folder: read_lumina2(LUMINA2, VQGAN, grid=8), "chameleon-vqgan", "no movqgan_270M.ckpt"),
    (lambda folder: read_lumina2(LUMINA2, VQGAN / "vqgan.ckpt", grid=8), "vqgan.ckpt", "norm_layer no MoVQGAN"),
    # Emu3 and Emu3.5
    (lambda folder: read_emu3(copy_published_emu3(folder)[0], grid=4), "vq", "nothing Emu3-VisionTokenizer"),
    (lambda folder: read_emu3(EMU3, folder, grid=4), "vq", "none"),
    (edit(EMU3, model_type="llama"), "model_type", "'llama' 'emu3' or 'Emu3'"),
    (edit(EMU3, tokens={"<|extra_200|>": 5}), "tokenizer.json: token '<|extra_200|>'", "id 549 id 5"),
    (
        edit(EMU3, tokens={"<|visual token 000007|>": 5}),
        "tokenizer.json: token '<|visual token 000007|>'",
        "id 564 id 5",
    ),
    (edit(EMU3, remove_weights("text_model.lm_head.")), "lm_head.weight", "missing weight"),
    (edit(EMU3, lambda w: w.update({TIME_CONV: torch.zeros(4, 4, 3, 3, 3)})), TIME_CONV, "[4, 4, 3, 3, 3] 4 taps"),
    (edit_published_emu3("emu3.tiktoken", "Ig== 1", "Ig== 0"), "emu3.tiktoken", "each once"),
    (edit_published_emu3("emu3_vision_tokens.txt", "000007", "000700"), "emu3.tiktoken", "96 visual tokens"),
    (
        edit_published_emu3("emu3_vision_tokens.txt", "image start", "start", boi_token_id=None),
        "emu3.tiktoken",
        "lacks <|image start|>",
    ),
    (lambda folder: read_emu3(EMU35, EMU35_VQ), "model_type", "family emu3 give `--family emu35`"),
    (lambda folder: read_emu35(EMU3, EMU35_VQ), "model_type", "give `--family emu3`"),
    (edit(EMU35, head_dim=8), "num_attention_heads", ""),
    (lambda folder: read_emu35(EMU35, folder), "", "no weights"),
    (copy_vq_file(VQ, lambda vq: read_emu35(EMU35, vq), "model.ckpt"), "", "encoder.down.0"),
    # Janus
    *(
        (edit(JANUS, config=change), f"config.json: {field}", "")
        for field, change in (
            ("hidden_size", lambda c: c["language_config"].pop("hidden_size")),  # transformers would assume 4096
            ("num_attention_heads", lambda c: c["language_config"].pop("num_attention_heads")),
            ("vision_config", lambda c: c["vision_config"]["params"].pop("image_size")),
            ("gen_vision_config", lambda c: c.pop("gen_vision_config")),  # JanusFlow
            ("cls", lambda c: c["gen_vision_config"].update(cls="VQ-8")),
        )
    ),
    (edit(JANUS, tokenizer=lambda text: (ANOLE / "tokenizer.json").read_text()), "", "no token of base model's"),
    (edit(JANUS, model_type="chameleon"), "config.json: model_type", ""),
    (
        edit(JANUS_CONVERTED, files={"generation_config.json": lambda text: '{"bos_token_id": 1}'}),
        "generation_config.json: pad_token_id, boi_token_id",
        "",
    ),
    (edit(JANUS, without="tokenizer.json"), "", "tokenizer.json"),
    (lambda folder: read_janus(JANUS, roles="User"), "roles", ""),
    # SimpleAR
    (edit(SIMPLEAR, model_type="qwen3"), "model_type", "'qwen3' 'qwen2'"),
    (edit(SIMPLEAR, use_sliding_window=True), "use_sliding_window", "True False"),
    (
        edit(SIMPLEAR, lambda w: w.update({KEY_BIAS: torch.zeros(112)})),
        "model.layers.1.self_attn.{q,k,v}_proj.bias",
        "(112,), (112,), (16,)",
    ),
    (edit(SIMPLEAR, tie_word_embeddings=False), "lm_head.weight", "missing weight"),
    (edit(SIMPLEAR, lambda w: w.update({EMBED: w[EMBED][:-1]})), "vq", "576 codes 575"),
    (edit(SIMPLEAR, tokenizer=lambda text: text.replace("<|soi|>", "<|sot|>")), "tokenizer.json", "lacks <|soi|>"),
    (copy_vq_file(COSMOS / "decoder.jit", lambda vq: read_simplear(SIMPLEAR, vq, grid=4)), "vq", "no weights"),
    # Prologue
    (edit_prologue(rotated_by_position=13), "config.json: rotated_by_position", "13 an even number up to 24"),
    (edit_prologue(rotated_by_row=8), "config.json: rotated_by_row", "8 an even number up to 6"),
    (lambda folder: read_prologue(PROLOGUE, PROLOGUE_VQ), "rotated_by_row", "None a JSON file, as --config"),
    (lambda folder: read_prologue(PROLOGUE, PROLOGUE, config=PROLOGUE_CONFIG), "model_2.safetensors", "no such file"),
    *(
        (edit_prologue(f"{file}.safetensors", remove_weights(name)), name, "missing weight")
        for file, name in (
            ("ar/model", "bos_emb.weight"),
            ("ar/model", "ar_model.cond_proj.0.weight"),
            ("ar/model", "ar_model.layers.1.gate1.weight"),
            ("ar/model", "ar_model.layers.1.attn1.to_kv.weight"),
            ("tokenizer/model_2", "semantic_quantizer.pos_select_mask"),
            ("tokenizer/model_2", "enc.layers.0.gate_mlp.weight"),
            ("tokenizer/model_3", "dec.layers.0.attn1.k_norm.weight"),
        )
    ),
    (edit_prologue("ar/model.safetensors", lambda w: w.update(extra=torch.ones(1))), "ar", "unexpected: extra"),
    (
        edit_prologue("ar/model.safetensors", lambda w: w.update({PROLOGUE_CODES: w[PROLOGUE_CODES][:-1]})),
        PROLOGUE_CODES,
        "120 rows 121",
    ),
    (edit_prologue("tokenizer/model_3.safetensors", remove_weights("dec.out.bias")), "", "missing: dec.out.bias"),
    (edit_prologue("tokenizer/model_2.safetensors", remove_weights("enc.learnable_query")), "", "enc.learnable_query"),
    # GLM-Image
    (edit_glm(GLM_CONFIG, lambda c: c.update(model_type="emu3")), "model_type", "emu3 zai-org/GLM-Image"),
    (edit_glm(GLM_CONFIG, lambda c: c.pop("image_start_token_id")), "image_start_token_id", "None token"),
    (
        edit_glm(GLM_CONFIG, lambda c: c["text_config"]["rope_parameters"].update(mrope_section=[1, 2, 3])),
        "mrope_section",
        "[1, 2, 3] together 5",
    ),
    (edit_glm(GLM_CONFIG, lambda c: c["text_config"].update(hidden_size=64)), "hidden_size", "64 80"),
    (edit_glm(GLM_CONFIG, lambda c: c["vision_config"].update(num_heads=5)), "num_heads", "5"),
    (edit_glm(GLM_CONFIG, lambda c: c["vision_config"].update(hidden_act="silu")), "hidden_act", "silu"),
    (edit_glm(GLM_CONFIG, lambda c: c.update(image_end_token_id=5000)), "image_end_token_id", "5000"),
    *(
        (
            edit_glm(GLM_PROCESSOR, lambda c, name=name, value=value: c["image_processor"].update({name: value})),
            name,
            "",
        )
        for name, value in (
            ("do_resize", False),
            ("do_rescale", False),
            ("do_normalize", False),
            ("rescale_factor", 1 / 127.5),
            ("resample", 2),
            ("patch_size", 14),
            ("merge_size", 2),
            ("image_mean", [0.5, "0.5", 0.5]),
            ("image_std", [0.5, 0, 1]),
        )
    ),
    (edit_glm(GLM_TOKENIZER, lambda c: c["model"]["vocab"].update(far=900)), "'far'", "id 900 at most 441"),
    (lambda folder: read_glm_image(GLM_IMAGE / "vision_language_encoder"), "", "a folder with processor"),
]


@pytest.mark.parametrize(
    ("read", "field", "words"), INVALID_CHECKPOINTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_invalid_checkpoints_are_rejected_by_field_and_value(
    tmp_path: Path, read: Reader, field: str, words: str
) -> None:
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


# ---------------------------------------------------------------- wrong downloads


WEB_PAGES = (
    "<!DOCTYPE html>\n<html>not found</html>",
    "\n <HTML>log in</HTML>",
    '<?xml version="1.0"?><Error>denied</Error>',
)
# By family, or the text encoder: function that reads a checkpoint as this family.
FAMILY_READERS: dict[str, Reader] = {
    "llamagen": lambda folder: read_llamagen(folder, VQ),
    "anole": READERS[ANOLE],
    "lumina": READERS[LUMINA],
    "lumina2": READERS[LUMINA2],
    "janus": READERS[JANUS],
    "emu3": READERS[EMU3],
    "simplear": READERS[SIMPLEAR],
    "text encoder": lambda folder: read_text_encoder(folder, 32),
}
# The keys are values of `model_type` in `config.json`.
FOLDERS = {"chameleon": ANOLE, "emu3": EMU3, "qwen2": SIMPLEAR, "multi_modality": JANUS}
FAMILIES = {"chameleon": "anole or lumina or lumina2", "emu3": "emu3", "qwen2": "simplear", "multi_modality": "janus"}


@pytest.mark.parametrize("family", FAMILY_READERS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_folder_of_another_model_is_rejected_with_its_family(tmp_path: Path, model_type: str, family: str) -> None:
    read = FAMILY_READERS[family]
    folder = FOLDERS[model_type]
    if family == FAMILIES[model_type].partition(" ")[0]:
        read(folder)
        return
    error = catch_error(CheckpointError, read, folder)
    if model_type == "chameleon" and family in ("lumina", "lumina2"):
        assert error.remedy == "family anole takes Anole, family lumina Lumina-mGPT"
        return
    assert error.field == f"{folder / 'config.json'}: model_type"
    assert error.found == repr(model_type)
    if family == "text encoder":
        assert "google/flan-t5-xl" in error.remedy
    else:
        assert error.expected == f"a model of family {family}"
        assert error.remedy == f"give `--family {FAMILIES[model_type]}`, or another target"


@pytest.mark.parametrize("value", [["chameleon"], {"a": 1}, 7, None, "x" * 10_000])
def test_an_invalid_model_type_is_rejected_with_a_short_error(tmp_path: Path, value: Any) -> None:
    error = catch_error(
        CheckpointError, read_anole, copy_checkpoint(ANOLE, tmp_path / "target", model_type=value), VQGAN
    )
    assert error.field.endswith("config.json: model_type")
    assert len(error.found) <= 80


@pytest.mark.parametrize("text", [LFS_POINTER, *WEB_PAGES])
@pytest.mark.parametrize("name", ["a.pt", "model.safetensors", "config.json", "tokenizer.json"])
def test_a_git_lfs_pointer_or_web_page_is_named_so(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    read = {"config.json": read_config, "tokenizer.json": lambda path: read_tokenizer(path, 9)}.get(name, read_weights)
    error = catch_error(CheckpointError, read, path)
    assert error.field == str(path)
    assert error.found == ("a Git LFS pointer" if text == LFS_POINTER else "a web page")
