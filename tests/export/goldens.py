"""Running graphs of an exported bundle in ONNX Runtime, far enough to compare them with recorded numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from lantern_rt.bundle.manifest import Manifest
from lantern_rt.export.compare import GraphFileSession
from lantern_rt.export.graph.graphs import HIDDEN

Arrays = dict[str, NDArray[Any]]
PLAIN = 1e-4
GUIDED = 3e-4
DATA = Path(__file__).parent.parent / "data"


def golden(folder: str) -> Arrays:
    with np.load(DATA / folder / "golden.npz") as file:
        return dict(file)


def manifest(bundle: Path) -> Manifest:
    return Manifest.model_validate_json((bundle / "bundle.json").read_text())


def close(found: np.ndarray, expected: np.ndarray, tolerance: float = PLAIN) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance, strict=True)


def embed(bundle: Path, ids: Any) -> NDArray[np.float32]:
    """Prefix rows `[rows, tokens, width]` of token ids, those of one row or of several."""
    tokens = np.atleast_2d(np.array(ids, np.int64))
    out = GraphFileSession(bundle / "condition.onnx").run({"token_ids": tokens, "uncond_ids": tokens[:, :1]})
    np.testing.assert_array_equal(out["uncond_embeds"], out["prefix_embeds"][:, :1])
    return out["prefix_embeds"]


def observed(path: Path, names: list[str], feeds: dict[str, Any]) -> list[NDArray[np.float32]]:
    """Values inside a graph, which nothing is fused in."""
    model = onnx.load(path)
    for name in names:
        if name not in {value.name for value in model.graph.output}:
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # it dies of an empty past
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(names, feeds))


class Run:
    """One decoder graph with the cache of everything it was fed."""

    def __init__(self, bundle: Path, role: str = "target", rows: int = 1) -> None:
        spec = getattr(manifest(bundle), role)
        self.session = GraphFileSession(bundle / f"{role}.onnx")
        parts = [f"{i}.{part}" for i in range(spec.num_layers) for part in ("key", "value")]
        self.past = {part: np.zeros((0, rows, spec.num_kv_heads, spec.head_dim), np.float32) for part in parts}
        self.columns = np.zeros((rows, 0), bool)  # which past columns real rows may see
        self.rows = rows

    @property
    def length(self) -> int:
        return self.columns.shape[1]

    def step(
        self,
        visible: NDArray[np.bool_] | None = None,
        columns: Any = True,
        positions: NDArray[Any] | None = None,
        **inputs: NDArray[Any],
    ) -> Arrays:
        """Feed new nodes, by default causal ones, and commit them all; `columns` says which can be seen later.

        `positions [nodes]` or `[rows, nodes]`: by default the nodes follow one another.
        """
        nodes = next(iter(inputs.values())).shape[1]
        among = np.tri(nodes, dtype=bool) if visible is None else visible
        before = np.broadcast_to(self.columns[:, None], (self.rows, nodes, self.length))
        seen = np.concatenate([before, np.broadcast_to(among, (self.rows, nodes, nodes))], 2)
        places = self.length + np.arange(nodes) if positions is None else positions
        out = self.session.run(
            {
                **{name: np.ascontiguousarray(array) for name, array in inputs.items()},
                "position_ids": np.broadcast_to(places, (self.rows, nodes)).astype(np.int64),
                "attention_mask": np.where(seen, 0, HIDDEN).astype(np.float32)[:, None],
                **{f"past_key_values.{part}": tensor for part, tensor in self.past.items()},
            }
        )
        for part, tensor in self.past.items():
            self.past[part] = np.concatenate([tensor, out[f"new_key_values.{part}"]])
        shown = np.broadcast_to(np.asarray(columns, bool), (self.rows, nodes))
        self.columns = np.concatenate([self.columns, shown], 1)
        return out


class Sides:
    """Both rows of a prompt of token ids, each on a cache of its own; uncond None: without guidance.

    first_code: the id of code 0, where the bundle's condition has text alone.
    """

    def __init__(
        self, bundle: Path, cond: Sequence[int], uncond: Sequence[int] | None, first_code: int | None = None
    ) -> None:
        text = [] if first_code is None else [embed(bundle, range(first_code))[0]]
        self.table = text and np.concatenate([*text, np.load(bundle / "code_embeddings.npy")])
        prompts = [cond] if uncond is None else [cond, uncond]
        self.bundle = bundle
        self.runs = [Run(bundle) for _ in prompts]
        self.outputs = [run.step(input_embeds=embed(bundle, ids)) for run, ids in zip(self.runs, prompts, strict=True)]

    def step(self, tokens: NDArray[np.int64], depth: NDArray[np.int64] | None = None, **visible: Any) -> list[Arrays]:
        """Feed tokens to both rows; depth: of the nodes of a tree."""
        embeds = embed(self.bundle, tokens) if len(self.table) == 0 else self.table[tokens][None]
        places = [None if depth is None else run.length + depth for run in self.runs]
        return [
            run.step(input_embeds=embeds, positions=at, **visible) for run, at in zip(self.runs, places, strict=True)
        ]


def guide(logits: NDArray[np.float32], scale: float) -> NDArray[np.float32]:
    """Logits of all conditional rows, then all unconditional rows."""
    cond, uncond = np.split(logits, 2)
    return uncond + np.float32(scale) * (cond - uncond)
