"""T5 text encoders, and the text condition graph, against `transformers` on small random encoders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused
from safetensors.torch import load_file, save_file
from small_models import save_t5

from lantern_rt.errors import CheckpointError
from lantern_rt.export.graph.conditions import CaptionCondition, text_condition
from lantern_rt.export.graph.graphs import write_graph
from lantern_rt.export.models.t5 import read_t5
from lantern_rt.export.parity import Sessions, check_parity

transformers = pytest.importorskip("transformers")


def caption(prefix: int, caption_dim: int, width: int = 16) -> CaptionCondition:
    torch.manual_seed(1)
    return CaptionCondition(
        torch.randn(width, caption_dim) / 4, torch.randn(width, width) / 4, torch.randn(prefix, caption_dim)
    )


def published(encoder: Any, caption: CaptionCondition, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """What LlamaGen computes from right-padded ids: encode, roll to the left, zero the padding, project."""
    with torch.no_grad():
        states = encoder(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).last_hidden_state
        rolled = torch.stack(
            [torch.roll(row, -int(length), 0) for row, length in zip(states, mask.sum(1), strict=True)]
        )
        rows: np.ndarray = caption.project(rolled * torch.from_numpy(mask[:, ::-1].copy())[..., None]).numpy()
    return rows


def left(ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    rolled = np.stack([np.roll(row, -length) for row, length in zip(ids, mask.sum(1), strict=True)])
    return {"token_ids": rolled, "token_mask": np.ascontiguousarray(mask[:, ::-1])}


def prompts(lengths: list[int], prefix: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    mask = (np.arange(prefix) < np.array(lengths)[:, None]).astype(np.int64)
    return np.random.default_rng(0).integers(1, vocabulary, size=mask.shape) * mask, mask


def test_prompts_of_every_length_give_what_transformers_and_llamagen_compute(tmp_path: Path) -> None:
    """Padding on the left from the start equals padding on the right and rolling: shortest, middle, longest."""
    encoder = save_t5(tmp_path / "t5")
    projection = caption(120, 32)
    graph = text_condition(read_t5(tmp_path / "t5")[0], b"", projection).graph
    path = write_graph(graph, tmp_path)[0]
    ids, mask = prompts([1, 7, 64, 119, 120], 120, 50)
    out = Sessions(path).run(left(ids, mask))
    expected = published(encoder, projection, ids, mask)
    np.testing.assert_allclose(out["prefix_embeds"], expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    for i, length in enumerate(mask.sum(1)):  # each alone, without padding
        alone = Sessions(path).run({"token_ids": ids[i : i + 1, :length], "token_mask": mask[i : i + 1, :length]})
        np.testing.assert_allclose(alone["prefix_embeds"][0], expected[i], rtol=0, atol=2e-5 * np.abs(expected).max())
        assert not alone["prefix_embeds"][0, : 120 - length].any()
    with torch.no_grad():
        uncond = projection.project(projection.uncond).numpy()
    np.testing.assert_allclose(out["uncond_embeds"], np.broadcast_to(uncond, expected.shape), rtol=0, atol=1e-6)


few = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@few
@given(
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 9),
    width=st.integers(2, 24),
    layers=st.integers(1, 3),
    buckets=st.sampled_from([8, 16, 32]),
    distance=st.integers(20, 200),
    prefix=st.integers(2, 40),
)
def test_encoders_of_any_size_equal_transformers(
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
    projection = caption(prefix, width)
    graph = text_condition(read_t5(folder)[0], b"", projection).graph
    path = write_graph(graph, folder)[0]
    assert check_parity(graph, path, graph.tolerance) < 1e-4
    ids, mask = prompts([1, max(prefix // 2, 1), prefix], prefix, 50)
    expected = published(encoder, projection, ids, mask)
    found = Sessions(path).run(left(ids, mask))["prefix_embeds"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5 * max(1, np.abs(expected).max()))


def test_the_encoder_of_a_whole_t5_in_shards_is_read_without_its_decoder(tmp_path: Path) -> None:
    save_t5(tmp_path / "one", whole=True)
    weights = load_file(tmp_path / "one/model.safetensors")
    two = tmp_path / "two"
    two.mkdir()
    shutil.copy(tmp_path / "one/config.json", two)
    weight_map = {}
    for i in range(2):
        part = {name: weights[name] for name in sorted(weights)[i::2]}
        save_file(part, two / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{i}.safetensors")
    # As in indices of converted files: second names of shared.weight, which the files dropped.
    weight_map |= dict.fromkeys(["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"], "model-0.safetensors")
    (two / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (one, _), (sharded, sources) = read_t5(tmp_path / "one"), read_t5(two)
    pairs = zip(one.state_dict().values(), sharded.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert [role for role, _ in sources] == [
        "text_encoder_index",
        "text_encoder",
        "text_encoder",
        "text_encoder_config",
    ]


def test_an_encoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    save_t5(tmp_path / "t5", feed_forward_proj="relu")
    with refused(CheckpointError, "t5/config.json: feed_forward_proj", "relu", "expected 'gated-gelu'"):
        read_t5(tmp_path / "t5")
    save_t5(tmp_path / "t5", relative_attention_num_buckets=6)
    with refused(CheckpointError, "t5/config.json: 6 buckets", "128, expected"):
        read_t5(tmp_path / "t5")


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with refused(CheckpointError, f"{tmp_path}: expected the folder of a T5 encoder", "no config.json"):
        read_t5(tmp_path)


def test_missing_and_unexpected_weights_are_listed_by_the_names_of_the_file(tmp_path: Path) -> None:
    save_t5(tmp_path / "t5")
    path = tmp_path / "t5/model.safetensors"
    weights = load_file(path)
    weights["encoder.block.1.extra"] = weights.pop("encoder.block.1.layer.0.SelfAttention.o.weight")
    save_file(weights, path)
    names = "missing: encoder.block.1.layer.0.SelfAttention.o.weight; unexpected: encoder.block.1.extra"
    with refused(CheckpointError, f"{tmp_path / 't5'}: the weights do not fit", names):
        read_t5(tmp_path / "t5")


def test_a_configuration_that_contradicts_the_weights_is_refused(tmp_path: Path) -> None:
    save_t5(tmp_path / "t5")
    path = tmp_path / "t5/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"d_ff": 80}))
    with refused(CheckpointError, "DenseReluDense.wi_0.weight has shape [40, 32], expected [80, 32]"):
        read_t5(tmp_path / "t5")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"d_kv": "two"}))
    with refused(CheckpointError, "t5/config.json: expected the configuration of a T5, found"):
        read_t5(tmp_path / "t5")


def test_more_layers_than_there_are_weights_for_are_not_built(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_t5(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"num_layers": 10**9, "eos_token_id": -1}))
    capfd.readouterr()
    with refused(CheckpointError, "num_layers is 1000000000, but the weights have 2"):
        read_t5(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields | {"eos_token_id": -1}))
    read_t5(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_two_tables_of_tokens_must_be_one(tmp_path: Path) -> None:
    save_t5(tmp_path / "t5")
    path = tmp_path / "t5/model.safetensors"
    weights = load_file(path)
    save_file(weights | {"encoder.embed_tokens.weight": weights["shared.weight"].clone()}, path)
    read_t5(tmp_path / "t5")
    save_file(weights | {"encoder.embed_tokens.weight": weights["shared.weight"] + 1}, path)
    with refused(CheckpointError, "shared.weight and encoder.embed_tokens.weight differ"):
        read_t5(tmp_path / "t5")
