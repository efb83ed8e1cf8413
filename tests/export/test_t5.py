"""T5 text encoders and graphs of text conditions, compared with `transformers` on small random encoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_copies import copy_as_shards, copy_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from small_models import save_t5
from tiny_graphs import write_graph

from lantern_rt.export.compare import GraphFileSession
from lantern_rt.export.graph.conditions import CaptionCondition, make_text_condition
from lantern_rt.export.models.t5 import read_text_encoder
from lantern_rt.export.verify import check_graph_parity

transformers = pytest.importorskip("transformers")


def make_caption_condition(prefix: int, caption_dim: int, width: int = 16) -> CaptionCondition:
    torch.manual_seed(1)
    return CaptionCondition(
        torch.randn(width, caption_dim) / 4, torch.randn(width, width) / 4, torch.randn(prefix, caption_dim)
    )


def compute_published_prefixes(
    encoder: Any, condition: CaptionCondition, ids: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    """Compute prefixes as LlamaGen does: encode, roll the padding to the left, zero it, project."""
    with torch.no_grad():
        states = encoder(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).last_hidden_state
        rolled = torch.stack(
            [torch.roll(row, -int(length), 0) for row, length in zip(states, mask.sum(1), strict=True)]
        )
        rows: np.ndarray = condition.project(rolled * torch.from_numpy(mask[:, ::-1].copy())[..., None]).numpy()
    return rows


def pad_left(ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """Return inputs of the condition graph, with the padding moved from the right to the left."""
    rolled = np.stack([np.roll(row, -length) for row, length in zip(ids, mask.sum(1), strict=True)])
    return {"token_ids": rolled, "token_mask": np.ascontiguousarray(mask[:, ::-1])}


def make_prompts(lengths: list[int], prefix: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    mask = (np.arange(prefix) < np.array(lengths)[:, None]).astype(np.int64)
    return np.random.default_rng(0).integers(1, vocabulary, size=mask.shape) * mask, mask


def test_prefixes_of_prompts_equal_those_of_llamagen(tmp_path: Path) -> None:
    encoder = save_t5(tmp_path / "t5")
    condition = make_caption_condition(120, 32)
    graph = make_text_condition(read_text_encoder(tmp_path / "t5", 32).encoder, b"", condition).graph
    path = write_graph(graph, tmp_path)
    ids, mask = make_prompts([1, 7, 64, 119, 120], 120, 50)
    outputs = GraphFileSession(path).run(pad_left(ids, mask))
    expected = compute_published_prefixes(encoder, condition, ids, mask)
    np.testing.assert_allclose(outputs["prefix_embeds"], expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    for i, length in enumerate(mask.sum(1)):  # each prompt alone, without padding
        single_outputs = GraphFileSession(path).run(
            {"token_ids": ids[i : i + 1, :length], "token_mask": mask[i : i + 1, :length]}
        )
        np.testing.assert_allclose(
            single_outputs["prefix_embeds"][0], expected[i], rtol=0, atol=1e-4 * np.abs(expected).max()
        )
        assert not single_outputs["prefix_embeds"][0, : 120 - length].any()
    with torch.no_grad():
        uncond = condition.project(condition.uncond).numpy()
    np.testing.assert_allclose(outputs["uncond_embeds"], np.broadcast_to(uncond, expected.shape), rtol=0, atol=1e-6)


few_examples = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@few_examples
@given(
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 9),
    width=st.integers(2, 24),
    layers=st.integers(1, 3),
    buckets=st.sampled_from([8, 16, 32]),
    distance=st.integers(20, 200),
    prefix=st.integers(2, 40),
)
def test_prefixes_of_t5_encoders_of_any_size_are_equal(
    tmp_path_factory: pytest.TempPathFactory,
    heads: int,
    head_dim: int,
    width: int,
    layers: int,
    buckets: int,
    distance: int,
    prefix: int,
) -> None:
    folder = tmp_path_factory.mktemp("t5")
    encoder = save_t5(
        folder,
        num_heads=heads,
        d_kv=head_dim,
        d_model=width,
        num_layers=layers,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=distance,
    )
    condition = make_caption_condition(prefix, width)
    graph = make_text_condition(read_text_encoder(folder, width).encoder, b"", condition).graph
    path = write_graph(graph, folder)
    assert check_graph_parity(graph, path) < 1e-4
    ids, mask = make_prompts([1, max(prefix // 2, 1), prefix], prefix, 50)
    expected = compute_published_prefixes(encoder, condition, ids, mask)
    embeds = GraphFileSession(path).run(pad_left(ids, mask))["prefix_embeds"]
    np.testing.assert_allclose(embeds, expected, rtol=0, atol=5e-5 * max(1, np.abs(expected).max()))


def test_the_encoder_is_read_from_a_sharded_whole_t5(tmp_path: Path) -> None:
    save_t5(tmp_path / "whole", whole=True)
    shards_folder = copy_as_shards(tmp_path / "whole", tmp_path / "sharded", shards=2)
    # Indices of converted files list other names of shared.weight, which the files do not have.
    index = json.loads((shards_folder / "model.safetensors.index.json").read_text())
    first_shard = "model-00001-of-00002.safetensors"
    index["weight_map"] |= dict.fromkeys(["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"], first_shard)
    (shards_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    whole, sharded = (read_text_encoder(folder, 32) for folder in (tmp_path / "whole", shards_folder))
    pairs = zip(whole.encoder.state_dict().values(), sharded.encoder.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    suffixes = ("_config", "_tokenizer", "_index", "", "")
    assert [role for role, _ in sharded.sources] == [f"text_encoder{suffix}" for suffix in suffixes]


def test_a_checkpoint_with_two_equal_embedding_tables_is_read(tmp_path: Path) -> None:
    save_t5(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"encoder.embed_tokens.weight": weights["shared.weight"].clone()}, path)
    encoder = read_text_encoder(tmp_path, 32).encoder
    assert torch.equal(encoder.embed_tokens.weight, weights["shared.weight"])


def test_an_invalid_padding_id_prints_no_warnings(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_t5(tmp_path)
    copy_json(tmp_path / "config.json", tmp_path / "config.json", pad_token_id=-1)
    capfd.readouterr()
    read_text_encoder(tmp_path, 32)
    assert capfd.readouterr() == ("", "")
