"""Graphs that compute in float16: close to their modules, safe where squares leave its range, whole as bundles."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from llamagen_golden import DATA
from onnx import TensorProto

from lantern_rt import Pipeline, open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.errors import CheckpointError, RequestError
from lantern_rt.export.graph.graphs import Graph, in_half, target_graph, write_graph
from lantern_rt.export.graph.precision import read_precisions
from lantern_rt.export.models.decoder import Decoder, DecoderConfig
from lantern_rt.export.models.eagle import EagleDrafter, drafter_graph
from lantern_rt.export.parity import check_parity

SMALL = DecoderConfig(64, 3, 4, 2, 96, 40, 3, 2, spare_positions=8)
NORMED = DecoderConfig(
    64, 2, 4, 2, 96, 40, 3, 2, spare_positions=8, rotary="sequence", rope_style="half", query_key_norm=True
)
DEEP = DecoderConfig(64, 2, 4, 4, 96, 40, 3, 2, spare_positions=8, head_hidden=48)


def target(config: DecoderConfig = SMALL, scale: float = 1.0) -> Graph:
    torch.manual_seed(0)
    return target_graph(Decoder(config).eval(), scale * torch.randn(config.vocab_size, config.hidden_size))


def drafter() -> Graph:
    torch.manual_seed(0)
    decoder = Decoder(SMALL).eval()
    config = DecoderConfig(64, 1, 4, 2, 96, 40, 3, 1, spare_positions=8, input_norm=False, final_norm=False)
    return drafter_graph(EagleDrafter(config, decoder.head, bias=True).eval())


@pytest.mark.parametrize(
    "graph", [target(), target(NORMED), target(DEEP), drafter()], ids=["", "normed", "deep", "drafter"]
)
def test_it_computes_in_float16_what_the_module_computes_in_float32(graph: Graph, tmp_path: Path) -> None:
    path, *_ = write_graph(in_half(graph), tmp_path)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)  # every operation has inputs of one type
    types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    assert types.pop("logits") == TensorProto.FLOAT
    assert types.pop("position_ids") == TensorProto.INT64
    types.pop("input_ids", None)
    assert set(types.values()) == {TensorProto.FLOAT16}
    difference = check_parity(graph, path, tolerance=0.01)
    assert difference > 1e-5  # it was not float32 after all


def test_squares_beyond_float16_do_no_harm(tmp_path: Path) -> None:
    graph = target(scale=2000)  # squares of 4,000,000; the largest number is 65,504
    assert check_parity(graph, write_graph(in_half(graph), tmp_path)[0], tolerance=0.01) < 0.01


def test_a_weight_beyond_float16_is_refused(tmp_path: Path) -> None:
    decoder = Decoder(SMALL).eval()
    with torch.no_grad():
        decoder.layers[1].ffn.up.weight[0, 0] = 1e6
    message = (
        "weight layers.1.ffn.up.weight: its numbers (largest 1e+06) do not fit float16; export with precision bf16-safe"
    )
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        write_graph(in_half(target_graph(decoder, torch.randn(40, 64))), tmp_path)


@pytest.mark.parametrize("method", ["ar", "lantern", "sjd"])
def test_a_bundle_of_float16_says_so_and_draws(t2i_half_bundle: Path, method: str) -> None:
    bundle = open_bundle(t2i_half_bundle)
    manifest = bundle.manifest
    assert (manifest.target.dtype, manifest.target.precision) == ("float16", "fp16")
    assert manifest.drafter is not None
    assert manifest.drafter.precision == "fp16"
    rng = np.random.default_rng(0)
    width = manifest.condition.caption_dim
    assert width is not None
    states = rng.standard_normal((1, manifest.condition.prefix, width), dtype=np.float32)
    result = Pipeline.from_bundle(bundle, threads=1)(
        embeddings=(states, np.ones((1, manifest.condition.prefix), np.int64)), method=method, seed=1
    )
    assert result.images[0].size == (manifest.image_width, manifest.image_height)


def test_verify_measures_what_float16_does(t2i_half_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    t2i = DATA / "llamagen-t2i"
    places = [t2i / "t2i_tiny.pt", DATA / "llamagen-vq/vq_tiny.pt", DATA / "lantern-drafter-llamagen"]
    places += [t2i / "config.json"]
    assert run_program(["verify", str(t2i_half_bundle), *map(str, places)]) == 0
    assert run_program(["verify", str(t2i_half_bundle)]) == 0  # against ONNX's reference evaluator
    assert "target" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compute": "half"}, "--compute: found 'half', expected float32 or float16"),
        (
            {"target": "int8-weights", "compute": "float16"},
            "--precision: found int8-weights, but --compute float16 stores fp16; leave it out",
        ),
        (
            {"drafter": "fp32", "compute": "float16"},
            "--drafter-precision: found fp32, but --compute float16 stores fp16; leave it out",
        ),
    ],
)
def test_what_float16_does_not_go_with_is_refused(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{re.escape(message)}$"):
        read_precisions(**arguments)
