"""Memory of an export: checkpoints are memory-mapped, and weights are converted one layer at a time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import save_file
from small_models import make_target
from tiny_graphs import write_graph
from torch import Tensor, nn

from lantern_rt.engines.contracts import TensorSpec
from lantern_rt.export.checkpoints.deferred import compute_deferred_tensor, defer_tensor
from lantern_rt.export.checkpoints.files import read_weights
from lantern_rt.export.compare import DeviceGraphSession, GraphFileSession, convert_weights
from lantern_rt.export.graph.graphs import Graph, make_graph_file, name_test_cases
from lantern_rt.export.graph.precision import StorageRule
from lantern_rt.export.models.decoder import DecoderConfig
from lantern_rt.export.verify import check_graph_parity
from lantern_rt.memory import PeakMemoryMonitor, measure_process_memory

MEGABYTE = 1 << 20
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def test_a_deferred_tensor_is_computed_only_when_used() -> None:
    calls: list[int] = []

    def make_tensor() -> Tensor:
        calls.append(1)
        return torch.arange(6.0).view(2, 3)

    tensor = defer_tensor(make_tensor, (2, 3), torch.float32)
    weight = nn.Parameter(tensor, requires_grad=False)
    assert (weight.shape, weight.dtype, weight.numel(), calls) == ((2, 3), torch.float32, 6, [])
    assert (weight + 1).sum() == 21
    assert compute_deferred_tensor(weight).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert len(calls) == 2


@only_linux
@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt"])
def test_reading_64_mb_of_weights_takes_less_than_24_mb(tmp_path: Path, call_in_new_process: Any, name: str) -> None:
    weights = {f"w{i}": torch.ones(8, MEGABYTE, dtype=torch.bfloat16) for i in range(4)}  # 16 MB each
    if name.endswith(".pt"):
        torch.save(weights, tmp_path / name)
    else:
        save_file(weights, tmp_path / name)
    assert call_in_new_process(measure_reading_memory, tmp_path / name) < 24 * MEGABYTE


def measure_reading_memory(path: Path) -> int:
    """Return the bytes of memory that reading a checkpoint of four weights adds to the process."""
    before = measure_process_memory() or 0
    with PeakMemoryMonitor() as peak:
        weights = read_weights(path)
    assert len(weights) == 4
    return (peak.bytes or 0) - before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_module_of_any_dtype_equals_its_graph(tmp_path: Path, dtype: torch.dtype) -> None:
    graph = make_target(dtype)
    assert check_graph_parity(graph, write_graph(graph, tmp_path)) < 2e-5
    assert {p.dtype for p in graph.module.parameters()} == {dtype}


def test_a_converted_module_is_restored_after_an_error() -> None:
    module = nn.Linear(3, 2).to(torch.bfloat16)
    weight = module.weight
    with convert_weights(module):
        with pytest.raises(RuntimeError):
            module(torch.ones(4))
        assert module(torch.ones(3)).dtype is torch.float32
    assert module.weight is weight
    assert not module._forward_pre_hooks


@only_linux
@pytest.mark.parametrize("rule", ["fp16", "int8"])
def test_only_one_layer_at_a_time_is_converted_to_float32(
    tmp_path: Path, call_in_new_process: Any, rule: StorageRule
) -> None:
    # Four attention matrices and three feed-forward matrices: 17 MB in float32. All 12 layers have 200 MB.
    layer_bytes = 4 * (4 * 512**2 + 3 * 512 * 2048)
    assert call_in_new_process(measure_export_memory, tmp_path, rule) < 6 * layer_bytes


def measure_export_memory(folder: Path, rule: StorageRule) -> int:
    """Return the bytes of memory for writing a decoder of 12 layers and running the file and device layouts."""
    config = DecoderConfig(512, 12, 8, 8, 2048, 64, 3, 2, spare_positions=8)
    graph = make_target(torch.bfloat16, config)
    plan = make_graph_file(graph, rule)
    inputs = list(graph.test_cases.values())[-1]
    before = measure_process_memory() or 0
    with PeakMemoryMonitor() as peak:
        path = plan.write(folder / "target.onnx")[0]
        with torch.no_grad(), convert_weights(graph.module, plan):
            graph.module(*(torch.from_numpy(inputs[value.name]) for value in graph.inputs))
        GraphFileSession(path, low_memory=True).run(inputs)
        DeviceGraphSession(graph, path, low_memory=True).run(inputs)
    return (peak.bytes or 0) - before


class SimilarWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.table = nn.Embedding(8, 8)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        mixed: Tensor = self.head(self.second(self.first(self.table(ids))))
        return mixed


def test_a_traced_graph_stores_a_shared_weight_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    test_cases = name_test_cases(*({"ids": np.arange(rows)} for rows in (2, 3)))
    graph = Graph(
        "similar_weights",
        SimilarWeights().eval(),
        (TensorSpec("ids", ("int64",), ("rows",)),),
        (TensorSpec("y", ("float32",), ("rows", 8)),),
        test_cases,
    )
    path = write_graph(graph, tmp_path)
    assert check_graph_parity(graph, path) < 1e-5
    assert len(onnx.load(path).graph.initializer) == 3
