"""What a checkpoint determines is taken from it; what contradicts it is refused; what it cannot tell is asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_copies import C2I, DRAFTER, T2I, VQ, changed, config_of, drafter_copy, edited

from lantern_rt.errors import CheckpointError, RequestError
from lantern_rt.export.families.llamagen import MODELS, Published, read_llamagen, read_transformer


def test_the_grid_is_what_the_weights_or_the_configuration_tell_and_else_the_callers(tmp_path: Path) -> None:
    no_block = changed(config_of(C2I), tmp_path / "config.json", block_size=None)
    stored = edited(tmp_path, C2I, lambda w: w.update(freqs_cis=torch.zeros(1 + 25, 8, 2)))
    assert read_transformer(C2I, config=config_of(C2I)).decoder.config.grid == 4
    assert read_transformer(C2I, config=config_of(C2I), grid=4).decoder.config.grid == 4
    assert read_transformer(stored, config=no_block).decoder.config.grid == 5
    assert read_transformer(C2I, config=no_block, grid=7).decoder.config.grid == 7
    with pytest.raises(CheckpointError, match=r"do not tell the grid of codes; give --grid 16 \(256 pixels\) or"):
        read_transformer(C2I, config=no_block)


def test_a_grid_that_positions_contradict_is_refused(tmp_path: Path) -> None:
    no_block = changed(config_of(C2I), tmp_path / "config.json", block_size=None)
    stored = edited(tmp_path, C2I, lambda w: w.update(freqs_cis=torch.zeros(1 + 25, 8, 2)))
    with pytest.raises(CheckpointError, match="freqs_cis tells of a grid of 5, but 7 was asked for; leave one out"):
        read_transformer(stored, config=no_block, grid=7)
    with pytest.raises(CheckpointError, match="block_size tells of a grid of 4, but 7 was asked for; leave one out"):
        read_transformer(C2I, config=config_of(C2I), grid=7)
    with pytest.raises(CheckpointError, match="block_size tells of a grid of 4, but 5 was asked for"):
        read_transformer(stored, config=config_of(C2I))
    far = changed(config_of(C2I), tmp_path / "far.json", block_size=10**60)
    with pytest.raises(RequestError, match="expected 1 to 256 code rows"):
        read_transformer(C2I, config=far)


def official(path: Path, name: str, text: bool = False) -> Path:
    """Weights of a published model's sizes, but for their numbers, of which there are few."""
    layers, width = MODELS[name][:2]
    shapes = {"tok_embeddings.weight": (8, width), "norm.weight": (width,), "output.weight": (8, width)}
    shapes |= (
        {"fc1.weight": (width, 8), "fc2.weight": (width, width)} if text else {"embedding_table.weight": (3, width)}
    )
    for i in range(layers):
        at = f"layers.{i}"
        shapes |= {f"{at}.attention_norm.weight": (width,), f"{at}.ffn_norm.weight": (width,)}
        shapes |= {f"{at}.attention.wqkv.weight": (3 * width, width), f"{at}.attention.wo.weight": (width, width)}
        shapes |= {f"{at}.feed_forward.{part}.weight": (16, width) for part in ("w1", "w3")}
        shapes[f"{at}.feed_forward.w2.weight"] = (width, 16)
    places = {"embedding_table": "cls_embedding", "fc1": "cls_embedding.cap_proj", "fc2": "cls_embedding.cap_proj"}
    weights = {
        f"{places[key.partition('.')[0]]}.{key}" if key.partition(".")[0] in places else key: torch.zeros(shape).half()
        for key, shape in shapes.items()
    }
    if text:
        weights["cls_embedding.uncond_embedding"] = torch.zeros(2, 8)
    torch.save(weights, path)
    return path


def test_a_published_models_heads_and_only_grid_need_no_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"GPT-S": Published(2, 64, 4, (16, 24), (16, 32)), "GPT-M": Published(1, 32, 2, (24,), ())}
    monkeypatch.setattr("lantern_rt.export.families.llamagen.MODELS", small)
    monkeypatch.setattr(f"{__name__}.MODELS", small)
    sizes = read_transformer(official(tmp_path / "a.pt", "GPT-S"), grid=24).decoder.config
    assert (sizes.num_heads, sizes.grid) == (4, 24)
    sizes = read_transformer(official(tmp_path / "b.pt", "GPT-M")).decoder.config
    assert (sizes.num_heads, sizes.grid) == (2, 24)
    with pytest.raises(CheckpointError, match=r"give --grid 16 \(256 pixels\) or --grid 24 \(384 pixels\), as"):
        read_transformer(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"give --grid 16 \(256 pixels\) or --grid 32 \(512 pixels\), as"):
        read_transformer(official(tmp_path / "c.pt", "GPT-S", text=True))


def test_heads_of_no_published_model_need_a_configuration() -> None:
    with pytest.raises(CheckpointError, match=r"number of heads does not show.* 3 layers of width 64; .*--config"):
        read_transformer(C2I)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input_type": "c2i"}, "input_type is 'c2i', expected 't2i' or 't2i2'"),
        ({"caption_dim": 2048}, "caption_dim is 2048, expected 32"),
        ({"cls_token_num": 120}, "cls_token_num is 120, expected 8"),
        ({"block_size": 256}, "block_size is 256, expected 36"),
        ({"rope_base": 500000}, "rope_base is 500000, expected 10000.0"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling is {'type': 'linear'}, expected none"),
        ({"vocab_size": 129}, "vocab_size is 129, but the weights have 128"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"attention_bias": True}, "attention_bias is True, expected False"),
        ({"head_dim": 8}, "num_attention_heads is 4"),
        ({"num_key_value_heads": 2}, "key heads do not explain"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, but the weights have 1"),
    ],
)
def test_a_drafter_that_was_trained_for_another_target_is_refused(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    folder = drafter_copy(tmp_path, **fields)
    with pytest.raises(CheckpointError, match=re.escape(words)) as caught:
        read_llamagen(T2I, VQ, drafter=folder, config=config_of(T2I))
    assert str(folder) in str(caught.value)


def test_a_drafter_of_texts_is_none_for_classes(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"input_type is 't2i', expected 'c2i'; give the drafter that was trained"
    ):
        read_llamagen(C2I, VQ, drafter=DRAFTER, config=config_of(C2I))
    folder = drafter_copy(tmp_path, input_type="c2i", num_classes=11)
    with pytest.raises(CheckpointError, match="num_classes is 11, expected 10"):
        read_llamagen(C2I, VQ, drafter=folder, config=config_of(C2I))
