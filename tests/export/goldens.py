"""Run graphs of an exported bundle in ONNX Runtime, to compare their values with recorded ones."""

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
TOLERANCE = 1e-4
GUIDED_TOLERANCE = 3e-4
DATA = Path(__file__).parent.parent / "data"


def load_golden(folder: str) -> Arrays:
    """Load the recorded arrays of a folder in `tests/data`; logits of words are NaN where no test reads them."""
    with np.load(DATA / folder / "golden.npz") as file:
        return dict(file)


def read_manifest(bundle: Path) -> Manifest:
    return Manifest.model_validate_json((bundle / "bundle.json").read_text())


def assert_close(values: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(values, expected, rtol=0, atol=tolerance, strict=True)


def embed(bundle: Path, ids: Any) -> NDArray[np.float32]:
    """Return the prefix embeddings `[rows, tokens, width]` of token ids, `[tokens]` or `[rows, tokens]`."""
    tokens = np.atleast_2d(np.array(ids, np.int64))
    out = GraphFileSession(bundle / "condition.onnx").run({"token_ids": tokens, "uncond_ids": tokens[:, :1]})
    np.testing.assert_array_equal(out["uncond_embeds"], out["prefix_embeds"][:, :1])
    return out["prefix_embeds"]


def read_values(path: Path, names: list[str], feeds: dict[str, Any]) -> list[NDArray[np.float32]]:
    """Run a graph without fusion, and return the values inside it that `names` name."""
    model = onnx.load(path)
    for name in names:
        if name not in {value.name for value in model.graph.output}:
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = (
        onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    )  # other levels crash with an empty cache
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(names, feeds))


class GraphRun:
    """Runs a decoder graph over successive nodes, with a cache of all nodes before.

    Args:
        bundle: folder of the bundle.
        role: role of the graph.
        rows: number of batch rows.
    """

    def __init__(self, bundle: Path, role: str = "target", rows: int = 1) -> None:
        spec = getattr(read_manifest(bundle), role)
        self.session = GraphFileSession(bundle / f"{role}.onnx")
        parts = [f"{i}.{part}" for i in range(spec.num_layers) for part in ("key", "value")]
        self.past = {part: np.zeros((0, rows, spec.num_kv_heads, spec.head_dim), np.float32) for part in parts}
        self.columns = np.zeros((rows, 0), bool)  # true where later nodes attend to a cached node
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
        """Run new nodes and append all of them to the cache.

        Args:
            visible: true where a new node attends to a new node, `[nodes, nodes]` or with rows; causal by default.
            columns: true for the nodes that later nodes attend to.
            positions: `[nodes]` or `[rows, nodes]`; consecutive by default.
            **inputs: inputs of the graph, `[rows, nodes, ...]`.
        """
        nodes = next(iter(inputs.values())).shape[1]
        among = np.tri(nodes, dtype=bool) if visible is None else visible
        on_past = np.broadcast_to(self.columns[:, None], (self.rows, nodes, self.length))
        mask = np.concatenate([on_past, np.broadcast_to(among, (self.rows, nodes, nodes))], 2)
        new_positions = self.length + np.arange(nodes) if positions is None else positions
        out = self.session.run(
            {
                **{name: np.ascontiguousarray(array) for name, array in inputs.items()},
                "position_ids": np.broadcast_to(new_positions, (self.rows, nodes)).astype(np.int64),
                "attention_mask": np.where(mask, 0, HIDDEN).astype(np.float32)[:, None],
                **{f"past_key_values.{part}": tensor for part, tensor in self.past.items()},
            }
        )
        for part, tensor in self.past.items():
            self.past[part] = np.concatenate([tensor, out[f"new_key_values.{part}"]])
        visible_later = np.broadcast_to(np.asarray(columns, bool), (self.rows, nodes))
        self.columns = np.concatenate([self.columns, visible_later], 1)
        return out


class PromptRuns:
    """Runs the conditional and the unconditional row of a prompt, each with its cache.

    Args:
        bundle: folder of the bundle.
        cond: ids of the conditional prompt.
        uncond: ids of the unconditional prompt; None without guidance.
        first_code: id of code 0, if the bundle's condition graph embeds text only.
    """

    def __init__(
        self, bundle: Path, cond: Sequence[int], uncond: Sequence[int] | None, first_code: int | None = None
    ) -> None:
        text = [] if first_code is None else [embed(bundle, range(first_code))[0]]
        self.table = text and np.concatenate([*text, np.load(bundle / "code_embeddings.npy")])
        prompts = [cond] if uncond is None else [cond, uncond]
        self.bundle = bundle
        self.runs = [GraphRun(bundle) for _ in prompts]
        self.outputs = [run.step(input_embeds=embed(bundle, ids)) for run, ids in zip(self.runs, prompts, strict=True)]

    def step(self, tokens: NDArray[np.int64], depth: NDArray[np.int64] | None = None, **visible: Any) -> list[Arrays]:
        """Run tokens in both rows; `depth` gives the depths of the nodes of a tree."""
        embeds = embed(self.bundle, tokens) if len(self.table) == 0 else self.table[tokens][None]
        positions = [None if depth is None else run.length + depth for run in self.runs]
        return [
            run.step(input_embeds=embeds, positions=row_positions, **visible)
            for run, row_positions in zip(self.runs, positions, strict=True)
        ]


def guide(logits: NDArray[np.float32], scale: float) -> NDArray[np.float32]:
    """Guide logits whose first half are conditional rows and whose second half are unconditional rows."""
    cond, uncond = np.split(logits, 2)
    return uncond + np.float32(scale) * (cond - uncond)
