"""Comparison of exported graphs with their PyTorch modules: equal outputs pass, different outputs are rejected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import catch_error
from small_models import CONFIG, make_target, randomise_norms
from tiny_graphs import make_decoder, write_graph
from torch import Tensor, nn

from lantern_rt.engines.contracts import TensorSpec
from lantern_rt.engines.device_graph import MASKED
from lantern_rt.errors import BundleError, ParityError
from lantern_rt.export.compare import GraphFileSession
from lantern_rt.export.families.common import make_vq_graphs
from lantern_rt.export.graph.graphs import Graph, make_target_graph, name_test_cases
from lantern_rt.export.models.decoder import EXCLUDED, Decoder, DecoderConfig
from lantern_rt.export.models.eagle import EagleDrafter, make_drafter_graph
from lantern_rt.export.models.llamagen_vq import LlamaGenVQ, VQTokenizerConfig
from lantern_rt.export.verify import check_graph_parity, choose_tolerance


@st.composite
def decoder_configs(draw: st.DrawFn) -> DecoderConfig:
    num_kv_heads = draw(st.integers(1, 3))
    heads = num_kv_heads * draw(st.integers(1, 3))
    width = heads * 4 * draw(st.integers(1, 4))
    return DecoderConfig(
        hidden_size=width,
        num_layers=draw(st.integers(1, 3)),
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=draw(st.integers(1, 40)),
        vocab_size=draw(st.integers(2, 50)),
        grid=draw(st.integers(2, 5)),
        prefix=draw(st.integers(1, 5)),
        prefix_rotation=draw(st.sampled_from(["zero", "identity"])),
        norm_eps=draw(st.sampled_from([1e-5, 1e-6, 1e-3])),
        input_norm=draw(st.booleans()),
        final_norm=draw(st.booleans()),
        rotary=draw(st.sampled_from(["grid", "sequence"])),
        rope_style=draw(st.sampled_from(["interleaved", "half"])),
        query_key_norm=draw(st.booleans()),
        rms_head_norm=draw(st.booleans()),
        head_width=draw(st.sampled_from([0, 4, 12])),
        qkv_bias=draw(st.booleans()),
        head_hidden=draw(st.sampled_from([0, 24])),
        activation=draw(st.sampled_from(["silu", "gelu-tanh"])),
        rope_sections=(draw(st.integers(0, 1)), 0, 0),
    )


few_examples = settings(max_examples=16, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@few_examples
@given(config=decoder_configs(), seed=st.integers(0, 99), two_heads=st.booleans(), adaptive=st.booleans())
def test_a_target_graph_gives_the_outputs_of_the_pytorch_module(
    tmp_path_factory: pytest.TempPathFactory, config: DecoderConfig, seed: int, two_heads: bool, adaptive: bool
) -> None:
    torch.manual_seed(seed)
    if two_heads and not adaptive:  # NAR has a norm before each of two heads, and a last layer for each head
        config = replace(config, two_heads=True, final_norm=True, num_layers=config.num_layers + 1)
    if adaptive:  # RAR
        config = replace(config, rotary="learned", conditions=3, final_norm=False, head_width=0, head_hidden=0)
    decoder = make_decoder(config)
    randomise_norms(decoder)
    graph = make_target_graph(decoder, torch.randn(config.vocab_size, config.hidden_size))
    assert check_graph_parity(graph, write_graph(graph, tmp_path_factory.mktemp("graph"))) < 2e-5


@few_examples
@given(config=decoder_configs(), seed=st.integers(0, 99), positions=st.integers(1, 9))
def test_a_target_graph_excludes_codes_by_position(
    tmp_path_factory: pytest.TempPathFactory, config: DecoderConfig, seed: int, positions: int
) -> None:
    torch.manual_seed(seed)
    decoder = Decoder(replace(config, limited_positions=positions))
    randomise_norms(decoder)
    decoder.code_limits[:] = torch.randn_like(decoder.code_limits).sign() * EXCLUDED
    graph = make_target_graph(decoder, torch.randn(config.vocab_size, config.hidden_size))
    path = write_graph(graph, tmp_path_factory.mktemp("graph"))
    assert check_graph_parity(graph, path) < 2e-5
    case = graph.test_cases["prefill"]
    logits = GraphFileSession(path).run(case)["logits"]
    limits = decoder.code_limits[np.minimum(case["position_ids"], positions - 1)].numpy()
    np.testing.assert_array_equal(logits == EXCLUDED, limits == EXCLUDED)
    decoder.head.requires_grad_(False)
    for weight in decoder.head.parameters():
        weight += 1e-2
    assert "logits by" in str(catch_error(ParityError, check_graph_parity, graph, path))


@few_examples
@given(config=decoder_configs(), seed=st.integers(0, 99), bias=st.booleans())
def test_a_drafter_graph_gives_the_outputs_of_the_pytorch_module(
    tmp_path_factory: pytest.TempPathFactory, config: DecoderConfig, seed: int, bias: bool
) -> None:
    torch.manual_seed(seed)
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    drafter = EagleDrafter(config, head, bias)
    randomise_norms(drafter)
    graph = make_drafter_graph(drafter)
    assert check_graph_parity(graph, write_graph(graph, tmp_path_factory.mktemp("graph"))) < 2e-5


class RoundingModule(nn.Module):
    """Module that rounds its input by adding and subtracting 1000, which gives the same result on every processor."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.tensor([1000.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset - self.offset


def test_the_tolerance_is_32_times_the_modules_rounding_error() -> None:
    values = np.full((1, 1), 0.1, np.float32)
    x = TensorSpec("x", ("float32",), ("rows", 1))
    y = TensorSpec("y", ("float32",), ("rows", 1))
    graph = Graph(
        "rounding", RoundingModule(), (x,), (y,), name_test_cases({"x": values}), lambda ops: None, tolerance=None
    )
    rounding = float(np.abs(values + np.float32(1000) - np.float32(1000) - values).max())
    assert choose_tolerance(graph) == pytest.approx(32 * rounding)
    assert choose_tolerance(replace(graph, tolerance=0.5)) == 0.5


@st.composite
def vq_configs(draw: st.DrawFn) -> VQTokenizerConfig:
    widths = tuple(draw(st.lists(st.sampled_from([32, 64]), min_size=1, max_size=2)))
    return VQTokenizerConfig(
        num_codes=draw(st.integers(2, 40)),
        code_width=draw(st.integers(2, 9)),
        latent_width=draw(st.integers(2, 20)),
        encoder_stem_width=32,
        encoder_widths=widths,
        decoder_widths=widths[::-1],
        num_blocks=1,
        has_attention=draw(st.booleans()),
        normalize_for_decoder=draw(st.booleans()),
        normalize_for_encoder=draw(st.booleans()),
    )


@settings(few_examples, max_examples=8)
@given(config=vq_configs(), grid=st.integers(2, 4))
def test_image_tokenizer_graphs_give_the_outputs_of_the_module(
    tmp_path_factory: pytest.TempPathFactory, config: VQTokenizerConfig, grid: int
) -> None:
    torch.manual_seed(0)
    tokenizer = LlamaGenVQ(config)
    randomise_norms(tokenizer)
    tokenizer.codebook.normal_()
    for graph in make_vq_graphs(tokenizer, grid):
        assert check_graph_parity(graph, write_graph(graph, tmp_path_factory.mktemp("graph"))) < 1e-4


@pytest.mark.parametrize("attention", [False, True])
def test_graphs_of_large_images_accept_several_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: bool
) -> None:
    torch.manual_seed(0)
    tokenizer = LlamaGenVQ(VQTokenizerConfig(20, 4, 8, 32, (32, 64), (64, 32), 1, attention))
    randomise_norms(tokenizer)
    tokenizer.codebook.normal_()
    two_image_graphs = make_vq_graphs(tokenizer, 3)
    monkeypatch.setattr(
        "lantern_rt.export.families.common.MAX_PAIR_PIXELS", 5
    )  # this tokenizer's images have 6 x 6 pixels
    for graph, two_image_graph in zip(make_vq_graphs(tokenizer, 3), two_image_graphs, strict=True):
        assert list(graph.test_cases) == ["1 rows"]
        assert (
            check_graph_parity(replace(graph, test_cases=two_image_graph.test_cases), write_graph(graph, tmp_path))
            < 1e-4
        )


def test_graphs_of_variable_size_accept_images_of_any_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = LlamaGenVQ(VQTokenizerConfig(20, 4, 8, 32, (32, 32, 32), (32, 32, 32), 1))
    randomise_norms(tokenizer)
    tokenizer.codebook.normal_()
    decoder, encoder = make_vq_graphs(tokenizer, 256, accepts_any_size=True)
    assert [case["images"].shape[2:] for case in encoder.test_cases.values()] == [(128, 128)] * 2
    assert [case["codes"].shape for case in decoder.test_cases.values()] == [(2, 32, 32), (1, 64, 16)]
    wide_inputs = {"codes": np.arange(18).reshape(2, 3, 3)}, {"images": np.ones((2, 3, 12, 20), np.float32)}
    for graph, inputs in zip((decoder, encoder), wide_inputs, strict=True):
        assert check_graph_parity(replace(graph, test_cases={"wide": inputs}), write_graph(graph, tmp_path)) < 1e-4


def test_large_vocabularies_are_tested_with_at_most_8_nodes() -> None:
    config = replace(CONFIG, vocab_size=1 << 17, prefix=99)
    graph = make_target_graph(Decoder(config), torch.zeros(1, config.hidden_size))
    assert [case["input_embeds"].shape[1] for case in graph.test_cases.values()] == [8, 1, 7, 8, 7]


def test_a_test_case_as_long_as_a_prompt_has_its_embeddings() -> None:
    prompt = torch.randn(CONFIG.prefix, CONFIG.hidden_size)
    graph = make_target_graph(Decoder(CONFIG), torch.zeros(1, CONFIG.hidden_size), prompt)
    embeds = next(iter(graph.test_cases.values()))["input_embeds"]
    np.testing.assert_array_equal(embeds, np.tile(prompt.numpy(), (len(embeds), 1, 1)))


def test_wrong_outputs_of_a_graph_are_named(tmp_path: Path) -> None:
    graph = make_target(torch.float32)
    path = write_graph(graph, tmp_path)
    with torch.no_grad():
        dict(graph.module.named_parameters())["layers.1.attention.qkv.weight"][-1] += 1e-2
    message = str(catch_error(ParityError, check_graph_parity, graph, path))
    expected_words = ("target.onnx", "logits by", "hidden_states by", "new_key_values.1.value by")
    assert [word for word in expected_words if word not in message] == []
    assert "new_key_values.0" not in message
    assert "new_key_values.1.key" not in message


def test_wrong_outputs_of_the_device_layout_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make_target(torch.float32)
    path = write_graph(graph, tmp_path)
    monkeypatch.setitem(MASKED, "float32", 0.0)  # masked positions are no longer masked
    error = catch_error(ParityError, check_graph_parity, graph, path)
    error_parts = str(error).partition(": logits by ")[2].split(", ")
    assert "new_key_values.0" not in str(error)  # keys and values of layer 0 do not depend on attention
    layouts = [part for part in error_parts if part.endswith(")")]
    assert layouts == ["device layout)"] * 6  # logits, hidden states, and keys and values of two layers


def test_a_graph_that_does_not_run_is_rejected(tmp_path: Path) -> None:
    graph = make_target(torch.float32)
    path = write_graph(graph, tmp_path)
    model = onnx.load(path)
    del model.graph.node[3]
    onnx.save(model, path)
    with pytest.raises(BundleError, match=r"target\.onnx: .*, expected a graph that runs"):
        check_graph_parity(graph, path)


class BatchSizeModule(nn.Module):
    """Module whose traced graph has the number of rows of the traced example as a constant."""

    def forward(self, x: Tensor) -> Tensor:
        return x * len(x)


def test_a_graph_correct_for_only_one_number_of_rows_is_rejected(tmp_path: Path) -> None:
    test_cases = name_test_cases(*({"x": torch.ones(rows, 3).numpy()} for rows in (2, 3)))
    graph = Graph(
        "batch_size",
        BatchSizeModule(),
        (TensorSpec("x", ("float32",), ("rows", 3)),),
        (TensorSpec("y", ("float32",), ("rows", 3)),),
        test_cases,
    )
    with pytest.raises(ParityError, match=r"y by .* \(3 rows\)"):
        check_graph_parity(graph, write_graph(graph, tmp_path))


def test_masked_attention_weights_vanish_and_none_is_denormal(tmp_path: Path) -> None:
    graph = make_target(torch.float32)
    model = onnx.load(write_graph(graph, tmp_path))
    softmaxes = [node.output[0] for node in model.graph.node if node.op_type == "Softmax"]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in softmaxes)
    inputs = graph.test_cases["rows of different length"]
    outputs = GraphFileSession(tmp_path / "target.onnx", low_memory=True, model=model.SerializeToString()).run(inputs)
    is_masked = inputs["attention_mask"] < 0
    shape = outputs[softmaxes[0]].shape
    # Axis 2 holds the queries of all heads that share a key head.
    is_masked = np.broadcast_to(np.tile(is_masked, (1, 1, shape[2] // is_masked.shape[2], 1)), shape)
    assert is_masked.any()
    for name in softmaxes:
        assert outputs[name].min() > np.finfo(np.float32).tiny
        assert outputs[name][is_masked].max() < 1e-30
        np.testing.assert_allclose(outputs[name].sum(-1), 1, rtol=1e-6)


def test_weights_above_a_megabyte_are_stored_in_a_separate_file(tmp_path: Path) -> None:
    graph = make_target(torch.float32)
    write_graph(graph, tmp_path)
    assert not (tmp_path / "target.onnx.data").exists()
    config = replace(CONFIG, hidden_size=128, intermediate_size=512, vocab_size=300)
    graph = make_target_graph(Decoder(config).eval(), torch.randn(300, 128))
    path = write_graph(graph, tmp_path)
    assert (tmp_path / "target.onnx.data").exists()
    assert path.stat().st_size < 50_000
    check_graph_parity(graph, path)
