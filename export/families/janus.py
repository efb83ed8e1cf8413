"""Model family Janus and Janus-Pro: one folder with decoder, generation head and image tokenizer.

The folder has DeepSeek's layout or the layout of transformers. The decoder is a Llama. Image tokens have a separate
vocabulary. An embedding table and a small network (the aligner) compute the decoder's input of a code; the export
stores the results as one table. A head with a hidden layer predicts codes. A prompt is a chat turn. In the
unconditional row, padding tokens replace the prompt's text, and the image tokens attend to this padding. LANTERN has no
drafter for Janus.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...bundle.conditions import TokenLayout
from ...errors import CheckpointError
from ...inputs import format_value
from ...methods import Sampling
from ..checkpoints.files import Config, make_file_error, read_tokenizer
from ..checkpoints.folders import Checkpoint
from ..family import ModelFamily
from ..graph.conditions import make_token_condition
from ..model import BundleContents
from ..models import exact
from ..models.llama import load_llama_decoder, make_decoder_config, rename_llama_weights
from ..models.vq_checkpoints import load_vq_tokenizer, rename_vqgan_weights
from .common import build_image_model, check_grid_rows

_CFG_SCALE = 5.0
_ROLES = "<|User|>,<|Assistant|>"
_START = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
_PADDING = "<\uff5c\u2581pad\u2581\uff5c>"
_PROCESSOR = "processor_config.json"
_CODES = 256  # number of codes whose embeddings are computed at a time, to save memory
# Defaults of LlamaConfig, which DeepSeek's configurations omit.
_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}


class _TransformersLayout:
    """Layout of transformers, whose generation_config.json has the ids of special tokens."""

    language_prefix = "model.language_model."
    code_embeddings_name = "model.generation_embeddings.weight"
    aligner = "model.generation_aligner."  # network that converts the embeddings of codes to inputs of the decoder
    head_layers = ("model.generation_head.proj_out", "model.generation_head.vision_head")
    vq = "model.vqmodel."
    # Weights that are needed only to understand images, to generate text or to train.
    unused_prefixes: tuple[str, ...] = ("model.vision_model.", "model.aligner.", "lm_head.")

    def __init__(self, target: Checkpoint, config: Config) -> None:
        config.get_section("vq_config").check_value("hidden_act", "gelu", None)
        self.text_config = config.get_section("text_config")
        self.vision_config = config.get_section("vision_config")  # has `image_size`, the side of an image in pixels
        self.generation = target.read_config_file("generation_config.json")
        # transformers generates without guidance at scales up to 1.
        self.cfg_scale = max(1.0, self.generation.get_number("guidance_scale", _CFG_SCALE))

    def list_aligner_layer_names(self, num_layers: int) -> list[str]:
        return ["fc1", *(f"hidden_layers.{i}" for i in range(num_layers - 1))]

    def find_special_token_ids(self, target: Checkpoint, num_embeddings: int) -> tuple[int, int, int]:
        """Return the ids of start of sequence, padding and begin of image."""
        extra = self.generation.get("generation_kwargs", {})
        names = ("bos_token_id", "pad_token_id", "boi_token_id")
        ids = {name: self.generation.get(name) for name in names}
        if isinstance(extra, Mapping) and "boi_token_id" in extra:  # transformers reads this id here
            ids["boi_token_id"] = extra["boi_token_id"]
        if missing := [name for name in names if type(ids.get(name)) is not int]:
            remedy = "give the model's own file"
            raise self.generation.make_error(", ".join(missing), "is not a token id", remedy=remedy)
        start, padding, begin = (ids[name] for name in names)
        return start, padding, begin


class _DeepSeekLayout:
    """Layout of DeepSeek's program, which finds special tokens by name."""

    language_prefix = "language_model.model."
    code_embeddings_name = "gen_embed.weight"
    aligner = "gen_aligner.layers."
    head_layers = ("gen_head.output_mlp_projector", "gen_head.vision_head")
    vq = "gen_vision_model."
    unused_prefixes: tuple[str, ...] = (
        "vision_model.",
        "aligner.",
        "language_model.lm_head.",
        f"{vq}quantize.codebook_used",
    )
    cfg_scale = _CFG_SCALE

    def __init__(self, target: Checkpoint, config: Config) -> None:
        config.get_section("gen_vision_config").check_value("cls", "VQ-16")
        self.text_config = config.get_section("language_config").with_defaults(_DEFAULTS)
        self.vision_config = config.get_section("vision_config", "params")
        has_processor = (target.path / _PROCESSOR).is_file()  # programs that train often leave it out
        self.processor = target.read_config_file(_PROCESSOR) if has_processor else replace(config, values={})
        self.processor.check_value("sft_format", "deepseek", None)

    def list_aligner_layer_names(self, num_layers: int) -> list[str]:
        return [str(2 * i) for i in range(num_layers)]  # an activation function is between two layers

    def find_special_token_ids(self, target: Checkpoint, num_embeddings: int) -> tuple[int, int, int]:
        names = [
            _START,
            self.processor.get("pad_tag", _PADDING),
            self.processor.get("image_start_tag", "<begin_of_image>"),
        ]
        path = target.path / "tokenizer.json"
        library = read_tokenizer(path, num_embeddings)
        start, padding, begin = (library.token_to_id(str(name)) for name in names)
        if start is None or padding is None or begin is None:
            missing = ", ".join(format_value(name) for name in names if library.token_to_id(str(name)) is None)
            expected = f"{', '.join(map(format_value, names))}, as in the base model's tokenizer.json"
            raise make_file_error(path, found=f"no token {missing}", expected=expected, remedy="give that file")
        return start, padding, begin


_CheckpointLayout = _TransformersLayout | _DeepSeekLayout


def read_janus(target: Checkpoint, *, roles: str = _ROLES) -> BundleContents:
    """Read Janus or Janus-Pro. `roles` are the names of user and assistant in the chat turn, with a comma between."""
    config = target.read_model_config("deepseek-ai/Janus-Pro-1B", "janus", "multi_modality")
    layout: _CheckpointLayout = (_TransformersLayout if config.get("model_type") == "janus" else _DeepSeekLayout)(
        target, config
    )
    user, *others = roles.split(",")
    if len(others) != 1:
        raise CheckpointError(field="roles", found=format_value(roles), expected="two roles, such as User,Assistant")
    tokenizer = target.find_tokenizer_path()
    pixels = layout.vision_config.get_integer("image_size")
    if pixels is None:
        raise config.make_error("vision_config", "lacks image_size, which determines the grid rows")
    target.read_weights(name_filter=lambda name: not name.startswith(layout.unused_prefixes))
    vq_checkpoint = target.extract_weights(layout.vq)
    rename_vqgan_weights(vq_checkpoint, coarsest_first=True)
    image_tokenizer = load_vq_tokenizer(vq_checkpoint)
    grid = pixels // image_tokenizer.config.pixels_per_cell
    check_grid_rows(grid)
    layout.vision_config.check_value("num_image_tokens", grid**2, None)
    aligner = target.extract_weights(layout.aligner)
    parts = {"embed.weight": f"{layout.language_prefix}embed_tokens.weight", "codes": layout.code_embeddings_name}
    for ours, theirs in zip(("head.first", "head.second"), layout.head_layers, strict=True):
        parts |= {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}
    rename_llama_weights(target, layout.language_prefix, parts)
    codes = target.get_shape("codes")[0]
    hidden = target.get_shape("head.first.weight")[0]
    sizes = make_decoder_config(target, layout.text_config, codes, grid, head_hidden=hidden)
    code_embeddings = _compute_code_embeddings(target.weights.pop("codes"), aligner, layout)
    decoder, text_embeddings = load_llama_decoder(target, sizes)
    start, padding, begin = layout.find_special_token_ids(target, len(text_embeddings))
    template = f"{user}: {{prompt}}\n\n{others[0]}:"
    prompt = TokenLayout(template=template, strip=True, before=(start,), after=(begin,), uncond_fill=padding)
    return build_image_model(
        decoder=decoder,
        code_embeddings=code_embeddings,
        condition=make_token_condition(text_embeddings, decoder.config.prefix, prompt, tokenizer),
        vq=image_tokenizer,
        sampling=Sampling(cfg_scale=layout.cfg_scale),
    )


FAMILY = ModelFamily(read_janus, optional_files=(_PROCESSOR,), model_types=("janus", "multi_modality"))


def _compute_code_embeddings(raw_embeddings: Tensor, aligner: Checkpoint, layout: _CheckpointLayout) -> Tensor:
    """Compute the decoder's input for each code from `[codes, width]`, float32 `[codes, hidden_size]`."""
    layers = layout.list_aligner_layer_names(len(aligner.weights) // 2)
    wanted = {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}
    if not layers or aligner.weights.keys() != wanted:
        raise aligner.make_error(found=str(sorted(aligner.weights)), expected=str(sorted(wanted)))
    weights = [
        exact.split_into_integer_matrices(aligner.weights[f"{layer}.weight"].float().numpy()) for layer in layers
    ]
    biases = [aligner.weights[f"{layer}.bias"].float().numpy() for layer in layers]
    table = []
    for start in range(0, len(raw_embeddings), _CODES):
        rows = exact.apply_exact_linear(raw_embeddings[start : start + _CODES].float().numpy(), weights[0], biases[0])
        for weight, bias in zip(weights[1:], biases[1:], strict=True):
            rows = exact.apply_exact_linear(exact.gelu(rows), weight, bias)
        table.append(torch.from_numpy(rows).float())
    return torch.cat(table)
