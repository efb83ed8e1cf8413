"""Invalid checkpoints of the families that users download whole; `test_refusals.py` reads them."""

from __future__ import annotations

import torch
from checkpoint_copies import (
    ANOLE,
    COSMOS,
    EMU3,
    EMU35,
    EMU35_VQ,
    GLM_IMAGE,
    JANUS,
    JANUS_CONVERTED,
    LUMINA,
    LUMINA2,
    MOVQGAN,
    SIMPLEAR,
    VQ,
    VQGAN,
    copy_published_emu3,
)
from edited_checkpoints import (
    LFS_POINTER,
    NESTED_ALIASES,
    Reader,
    copy_vq_file,
    edit,
    edit_glm,
    edit_json,
    edit_published_emu3,
    read_early_row_end,
    read_metas_layout,
    remove_weights,
    replace_vqgan_config,
    swap_tokens,
)
from family_readers import (
    read_anole,
    read_emu3,
    read_emu35,
    read_glm_image,
    read_janus,
    read_lumina,
    read_lumina2,
    read_simplear,
)

YAML = (VQGAN / "vqgan.yaml").read_text()
EMBED = "model.embed_tokens.weight"
TIME_CONV = "vqmodel.encoder.time_conv.0.conv.conv.weight"
QUERY_NORM = "model.layers.0.self_attn.q_norm.bias"
KEY_BIAS = "model.layers.1.self_attn.k_proj.bias"
GLM_CONFIG = "vision_language_encoder/config.json"
GLM_TOKENIZER = "processor/tokenizer.json"

# By name: function that reads the checkpoint, last part of the invalid field's name, words of the message.
INVALID_FAMILIES: dict[str, tuple[Reader, str, str]] = {
    # Anole
    "Anole without a tokenizer": (edit(ANOLE, without="tokenizer.json"), "", "has no tokenizer.json"),
    "file instead of a folder": (
        lambda folder: read_anole(ANOLE / "model.safetensors", VQGAN),
        "model.safetensors",
        "a file a folder with config.json",
    ),
    "token above the vocabulary": (
        edit(ANOLE, files={"tokenizer.json": edit_json(lambda c: c["model"]["vocab"].update(far=176))}),
        "'far'",
        "id 176 at most 175",
    ),
    "swapped tokens": (
        edit(ANOLE, files={"tokenizer.json": edit_json(swap_tokens)}),
        "'<racm3:break>'",
        "id 132 id 133",
    ),
    **{
        f"Anole's {name}": (edit(ANOLE, **{name: value}), f"target/config.json: {name}", words)
        for name, value, words in (
            ("model_type", "llama", "'llama' 'chameleon'"),
            ("architectures", ["ChameleonXLLMXForConditionalGeneration"], "ChameleonXLLMX family lumina Lumina-mGPT"),
            ("hidden_size", 32, "32 64"),
            ("swin_norm", True, "True False"),
            ("max_position_embeddings", 60, "60 more than the 64"),
            ("vocabulary_map", None, "None token ids by names"),
        )
    },
    "unknown model": (edit(ANOLE, model_type="mamba"), "config.json: model_type", "leloy/Anole-7b-v0.1-hf"),
    "Meta's layout": (read_metas_layout, "", "Meta's layout leloy/Anole-7b-v0.1-hf"),
    "Anole without the tokens around images": (
        edit(ANOLE, vocabulary_map={"<s>": 0}),
        "vocabulary_map",
        "lacks <racm3:break>, <reserved08706>",
    ),
    "Anole without an image token": (
        edit(ANOLE, config=lambda c: c["vocabulary_map"].pop("IMGIMGBZ")),
        "vocabulary_map",
        "127 image tokens consecutive",
    ),
    "Lumina-mGPT as Anole": (lambda folder: read_anole(LUMINA, VQGAN), "architectures", "with mask_image_logits"),
    "scaled positions": (edit(ANOLE, rope_scaling={"type": "linear"}), "rope_scaling", "'linear' plain"),
    "scaled positions beside plain ones": (
        edit(ANOLE, rope_parameters={"rope_type": "default"}, rope_scaling={"rope_type": "llama3"}),
        "rope_scaling",
        "'llama3' plain",
    ),
    "scaled positions in some layers": (
        edit(ANOLE, rope_parameters={"full_attention": {"rope_type": "yarn"}}),
        "rope_parameters",
        "'yarn' plain",
    ),
    "codes unlike the YAML file": (
        replace_vqgan_config(YAML.replace("n_embed: 128", "n_embed: 64")),
        "vqgan.yaml: n_embed",
        "64 128",
    ),
    "no YAML file": (replace_vqgan_config(None), "grid", "no .yaml"),
    "grid unlike the YAML file": (lambda folder: read_anole(ANOLE, VQGAN, grid=4), "grid", "4 8"),
    "Git LFS pointer as YAML": (replace_vqgan_config(LFS_POINTER), "vqgan.yaml", "a Git LFS pointer"),
    "large YAML": (replace_vqgan_config("#" * 20_000), "vqgan.yaml", "more than 16,384 bytes"),
    "deep YAML": (replace_vqgan_config("[" * 9000), "vqgan.yaml", "levels deep"),
    "nested aliases of YAML": (replace_vqgan_config(NESTED_ALIASES), "vqgan.yaml", "YAML aliases"),
    "broken YAML": (replace_vqgan_config("model: ["), "vqgan.yaml", "YAML"),
    "YAML without settings": (
        replace_vqgan_config("model: {params: {embed_dim: 16}}"),
        "ddconfig",
        "settings of the model",
    ),
    # Lumina-mGPT
    "query norm of the wrong shape": (
        edit(LUMINA, lambda w: w.update({QUERY_NORM: torch.ones(3, 16)})),
        "target",
        f"{QUERY_NORM} [3, 16] [4, 16]",
    ),
    "Lumina-mGPT without a grid": (lambda folder: read_lumina(LUMINA, VQGAN), "grid", "nothing 32, 48 or 64"),
    "Lumina-mGPT of an odd grid": (lambda folder: read_lumina(LUMINA, VQGAN, grid=5), "grid", "5 32, 48 or 64"),
    "Anole as Lumina-mGPT": (
        edit(LUMINA, config=lambda c: c.pop("mask_image_logits")),
        "architectures",
        "without mask_image_logits family anole",
    ),
    "token above the embedding table": (
        edit(LUMINA, config=lambda c: c["vocabulary_map"].update({"<reserved08799>": 600})),
        EMBED,
        "518 rows 600",
    ),
    "row end before the image tokens": (read_early_row_end, "<reserved08799>", "token 3"),
    # Lumina-mGPT 2.0
    "grid not a multiple of 4": (lambda folder: read_lumina2(LUMINA2, MOVQGAN, grid=10), "grid", "10 multiple of 4"),
    "Lumina-mGPT as 2.0": (
        lambda folder: read_lumina2(LUMINA, MOVQGAN, grid=8),
        "tokenizer.json",
        "<s> Qwen's family lumina takes the first",
    ),
    "Anole as Lumina-mGPT 2.0": (
        edit(LUMINA2, config=lambda c: c.pop("mask_image_logits")),
        "architectures",
        "without mask_image_logits",
    ),
    "no vocab_size": (edit(LUMINA2, vocab_size=None), "vocab_size", "None text 96 tokens"),
    "no eos_token": (
        edit(LUMINA2, files={"tokenizer_config.json": lambda text: text.replace("eos_token", "end")}),
        "eos_token",
        "None name",
    ),
    "no token for an image size": (
        edit(LUMINA2, files={"tokenizer.json": lambda text: text.replace("08804>", "04>")}),
        "tokenizer.json",
        "lacks <reserved08804>",
    ),
    "no MoVQGAN": (
        lambda folder: read_lumina2(LUMINA2, VQGAN, grid=8),
        "chameleon-vqgan",
        "no movqgan_270M.ckpt",
    ),
    "VQGAN as MoVQGAN": (
        lambda folder: read_lumina2(LUMINA2, VQGAN / "vqgan.ckpt", grid=8),
        "vqgan.ckpt",
        "norm_layer no MoVQGAN",
    ),
    # Emu3 and Emu3.5
    "Emu3 without an image tokenizer": (
        lambda folder: read_emu3(copy_published_emu3(folder)[0], grid=4),
        "vq",
        "nothing Emu3-VisionTokenizer",
    ),
    "Emu3 of two image tokenizers": (lambda folder: read_emu3(EMU3, folder, grid=4), "vq", "none"),
    "another model as Emu3": (edit(EMU3, model_type="llama"), "model_type", "'llama' 'emu3' or 'Emu3'"),
    "Emu3 token of two ids": (
        edit(EMU3, config=lambda c: c["vocabulary_map"].update({"<|extra_200|>": 5})),
        "tokenizer.json: token '<|extra_200|>'",
        "id 549 id 5",
    ),
    "Emu3 code of two ids": (
        edit(EMU3, config=lambda c: c["vocabulary_map"].update({"<|visual token 000007|>": 5})),
        "tokenizer.json: token '<|visual token 000007|>'",
        "id 564 id 5",
    ),
    "Emu3 without a head": (
        edit(EMU3, remove_weights("text_model.lm_head.")),
        "lm_head.weight",
        "missing weight text_model.model.layers.0.input_layernorm.weight",
    ),
    "Emu3's number of taps": (
        edit(EMU3, lambda w: w.update({TIME_CONV: torch.zeros(4, 4, 3, 3, 3)})),
        TIME_CONV,
        "[4, 4, 3, 3, 3] for 4 frames 4 taps",
    ),
    "Emu3's duplicate rank": (edit_published_emu3("emu3.tiktoken", "Ig== 1", "Ig== 0"), "emu3.tiktoken", "each once"),
    "Emu3's order of visual tokens": (
        edit_published_emu3("emu3_vision_tokens.txt", "000007", "000700"),
        "emu3.tiktoken",
        "96 visual tokens",
    ),
    "Emu3 without an image start": (
        edit_published_emu3("emu3_vision_tokens.txt", "image start", "start", boi_token_id=None),
        "emu3.tiktoken",
        "lacks <|image start|>",
    ),
    "Emu3.5 as Emu3": (
        lambda folder: read_emu3(EMU35, EMU35_VQ),
        "model_type",
        "a model of family emu3 give `--family emu35`, or another target",
    ),
    "Emu3 as Emu3.5": (lambda folder: read_emu35(EMU3, EMU35_VQ), "model_type", "give `--family emu3`"),
    "Emu3.5's head width": (edit(EMU35, head_dim=8), "num_attention_heads", ""),
    "Emu3.5 without an image tokenizer": (lambda folder: read_emu35(EMU35, folder), "", "no weights"),
    "LlamaGen's image tokenizer as Emu3.5's": (
        copy_vq_file(VQ, "model.ckpt", lambda vq: read_emu35(EMU35, vq)),
        "",
        "encoder.down.0",
    ),
    # Janus
    **{
        f"Janus' {field}": (edit(JANUS, config=change), f"config.json: {field}", "")
        for field, change in (
            ("hidden_size", lambda c: c["language_config"].pop("hidden_size")),  # transformers would assume 4096
            ("num_attention_heads", lambda c: c["language_config"].pop("num_attention_heads")),
            ("vision_config", lambda c: c["vision_config"]["params"].pop("image_size")),
            ("gen_vision_config", lambda c: c.pop("gen_vision_config")),  # JanusFlow
            ("cls", lambda c: c["gen_vision_config"].update(cls="VQ-8")),
        )
    },
    "Janus with Anole's tokenizer": (
        edit(JANUS, files={"tokenizer.json": lambda text: (ANOLE / "tokenizer.json").read_text()}),
        "",
        "other tokens give the base model's tokenizer",
    ),
    "Janus as another model": (edit(JANUS, model_type="chameleon"), "config.json: model_type", ""),
    "Janus without special tokens": (
        edit(JANUS_CONVERTED, files={"generation_config.json": lambda text: '{"bos_token_id": 1}'}),
        "generation_config.json: pad_token_id, boi_token_id",
        "",
    ),
    "Janus without a tokenizer": (edit(JANUS, without="tokenizer.json"), "", "tokenizer.json"),
    "one role of Janus": (lambda folder: read_janus(JANUS, roles="User"), "roles", ""),
    # SimpleAR
    "another model than Qwen2": (edit(SIMPLEAR, model_type="qwen3"), "model_type", "'qwen3' 'qwen2'"),
    "sliding windows": (edit(SIMPLEAR, use_sliding_window=True), "use_sliding_window", "True False"),
    "key bias of the wrong shape": (
        edit(SIMPLEAR, lambda w: w.update({KEY_BIAS: torch.zeros(112)})),
        "model.layers.1.self_attn.{q,k,v}_proj.bias",
        "(112,), (112,), (16,)",
    ),
    "no untied head": (edit(SIMPLEAR, tie_word_embeddings=False), "lm_head.weight", "missing weight"),
    "few code embeddings": (edit(SIMPLEAR, lambda w: w.update({EMBED: w[EMBED][:-1]})), "vq", "576 codes 575"),
    "SimpleAR without an image start": (
        edit(SIMPLEAR, files={"tokenizer.json": lambda text: text.replace("<|soi|>", "<|sot|>")}),
        "tokenizer.json",
        "lacks <|soi|>",
    ),
    "image tokenizer without an encoder": (
        copy_vq_file(COSMOS / "decoder.jit", "decoder.jit", lambda vq: read_simplear(SIMPLEAR, vq, grid=4)),
        "vq",
        "no weights",
    ),
    # GLM-Image
    "another model than GLM-Image": (
        edit_glm(GLM_CONFIG, lambda c: c.update(model_type="emu3")),
        "model_type",
        "emu3 zai-org/GLM-Image",
    ),
    "GLM-Image without an image start": (
        edit_glm(GLM_CONFIG, lambda c: c.pop("image_start_token_id")),
        "image_start_token_id",
        "None token",
    ),
    "GLM-Image's position parts": (
        edit_glm(GLM_CONFIG, lambda c: c["text_config"]["rope_parameters"].update(mrope_section=[1, 2, 3])),
        "mrope_section",
        "[1, 2, 3] together 5",
    ),
    "GLM-Image's width": (
        edit_glm(GLM_CONFIG, lambda c: c["text_config"].update(hidden_size=64)),
        "hidden_size",
        "64 80",
    ),
    "GLM-Image's vocabulary": (
        edit_glm(GLM_TOKENIZER, lambda c: c["model"]["vocab"].update(far=900)),
        "'far'",
        "id 900 at most 441",
    ),
    "GLM-Image without its processor": (
        lambda folder: read_glm_image(GLM_IMAGE / "vision_language_encoder"),
        "",
        "a folder with vision_language_encoder and processor",
    ),
}
