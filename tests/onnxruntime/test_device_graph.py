"""The device layout without fused attention, on the CPU: the same numbers as with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_backends import SMALL, SmallModel

from lantern_rt.bundle.files import open_bundle
from lantern_rt.bundle.manifest import DecoderSpec, DrafterSpec
from lantern_rt.engines.contracts import Array, Tensor
from lantern_rt.engines.device_graph import WORD, device_graph
from lantern_rt.engines.ort.session import GraphSession

ROWS, NODES, COLUMNS, ENTRIES = 3, 4, 32, 7
FUSED = b"\x22\x09Attention"  # a node's op, as the file has it


def outputs(path: Path, spec: DecoderSpec | DrafterSpec, drafts: bool, plain: bool) -> tuple[list[Array], bytes]:
    """What a pass of random numbers gives; rows and nodes see different columns."""
    made, rng = device_graph(path, spec, drafts, plain), np.random.default_rng(2)

    given = {
        "write": np.stack(np.meshgrid(np.arange(ROWS), np.arange(20, 20 + NODES), indexing="ij"), -1),
        "column_ids": np.arange(COLUMNS),
        "seen_by_all": rng.integers(1, 1 << 12, (ROWS, COLUMNS // WORD)),
        "columns": np.tile(np.arange(WORD, 2 * WORD), (ROWS, 1)),
        "seen": rng.integers(1 << 4, 1 << 8, (ROWS, NODES, 1)),
    }

    def filled(tensor: Tensor) -> Array:
        dtype, width = tensor.dtypes[0], tensor.shape[-1] or 0
        if dtype.startswith("float"):
            shape = {"embeddings": (ENTRIES,), "hidden": (1, ENTRIES)}.get(tensor.name, (ROWS, COLUMNS))
            return rng.normal(size=(*shape, width)).astype(dtype)
        found = given[tensor.name] if tensor.name in given else rng.integers(0, 4, (ROWS, NODES))
        return found.astype(dtype)

    feeds = {tensor.name: filled(tensor) for tensor in made.inputs}
    return GraphSession(path, made.inputs, made.outputs, 1, model=made.model).run(feeds), made.model


def check(path: Path, spec: DecoderSpec | DrafterSpec, drafts: bool) -> None:
    fused, model = outputs(path, spec, drafts, False)
    found, plain = outputs(path, spec, drafts, True)
    assert FUSED in model
    assert FUSED not in plain
    for expected, own in zip(fused, found, strict=True):
        np.testing.assert_allclose(own, expected, atol=2e-5, rtol=1e-4)


def test_products_give_what_the_op_gives_also_where_heads_share_keys(tmp_path: Path) -> None:
    assert SMALL.num_heads != SMALL.num_kv_heads
    small = SmallModel(tmp_path)
    check(tmp_path / "target.onnx", small.target_spec, False)
    check(tmp_path / "drafter.onnx", small.drafter_spec, True)


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_products_give_what_the_op_gives_in_the_embedded_model(role: str) -> None:
    bundle = open_bundle("scenes")
    spec = bundle.manifest.target if role == "target" else bundle.manifest.drafter
    assert spec is not None
    check(bundle.path(role), spec, role == "drafter")
