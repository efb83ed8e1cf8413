"""Running an exported LlamaGen bundle in ONNX Runtime, far enough to compare it with recorded numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from lantern_rt.bundle.manifest import Manifest
from lantern_rt.export.graph.graphs import HIDDEN
from lantern_rt.export.parity import Sessions

Arrays = dict[str, NDArray[Any]]
PLAIN, GUIDED = 1e-4, 3e-4
DATA = Path(__file__).parent.parent / "data"


def golden(folder: str) -> Arrays:
    with np.load(DATA / folder / "golden.npz") as file:
        return dict(file)


def manifest(bundle: Path) -> Manifest:
    return Manifest.model_validate_json((bundle / "bundle.json").read_text())


def condition(bundle: Path, **inputs: NDArray[Any]) -> NDArray[np.float32]:
    """Prefix rows of all conditional rows, then all unconditional rows."""
    out = Sessions(bundle / "condition.onnx").run(inputs)
    return np.concatenate([out["prefix_embeds"], out["uncond_embeds"]])


def own_only(mask: NDArray[Any]) -> NDArray[np.bool_]:
    """Visibility of a left-padded prefix `[rows, prefix, prefix]`: padded rows see themselves only."""
    prefix = mask.shape[1]
    return (np.tril(np.ones((prefix, prefix), bool)) & (mask[:, None] > 0)) | np.eye(prefix, dtype=bool)


def close(found: np.ndarray, expected: np.ndarray, tolerance: float = PLAIN) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance, strict=True)


def rotary_table(path: Path) -> np.ndarray:
    weights = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    cos, sin = weights["rotary.cos"], weights["rotary.sin"]
    np.testing.assert_array_equal(cos[:, ::2], cos[:, 1::2])
    np.testing.assert_array_equal(sin[:, ::2], -sin[:, 1::2])
    return np.stack([cos[:, ::2], sin[:, 1::2]], -1)


class Run:
    """One decoder graph with the cache of everything it was fed."""

    def __init__(self, path: Path, heads: int, width: int, layers: int, rows: int) -> None:
        self.session = Sessions(path)
        parts = [f"{i}.{part}" for i in range(layers) for part in ("key", "value")]
        self.past = {part: np.zeros((0, rows, heads, width), np.float32) for part in parts}
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

        `positions [nodes]`: by default the nodes follow one another.
        """
        nodes = next(iter(inputs.values())).shape[1]
        among = np.tril(np.ones((nodes, nodes), bool)) if visible is None else visible
        before = np.broadcast_to(self.columns[:, None], (self.rows, nodes, self.length))
        seen = np.concatenate([before, np.broadcast_to(among, (self.rows, nodes, nodes))], 2)
        places = self.length + np.arange(nodes) if positions is None else positions
        positions = np.broadcast_to(places, (self.rows, nodes))
        out = self.session.run(
            {
                **inputs,
                "position_ids": np.ascontiguousarray(positions, np.int64),
                "attention_mask": np.where(seen, 0, HIDDEN).astype(np.float32)[:, None],
                **{f"past_key_values.{part}": tensor for part, tensor in self.past.items()},
            }
        )
        for part, tensor in self.past.items():
            self.past[part] = np.concatenate([tensor, out[f"new_key_values.{part}"]])
        shown = np.broadcast_to(np.asarray(columns, bool), (self.rows, nodes))
        self.columns = np.concatenate([self.columns, shown], 1)
        return out


class Target:
    """A target after its prefill; `logits` and `hidden` are those of the prefix."""

    def __init__(self, bundle: Path, prefix: NDArray[np.float32], mask: NDArray[Any] | None = None) -> None:
        spec = manifest(bundle).target
        self.codes = np.load(bundle / "code_embeddings.npy")
        self.run = Run(bundle / "target.onnx", spec.num_kv_heads, spec.head_dim, spec.num_layers, len(prefix))
        mask = np.ones(prefix.shape[:2], bool) if mask is None else mask > 0
        out = self.run.step(own_only(mask), mask, input_embeds=prefix)
        self.logits, self.hidden = out["logits"], out["hidden_states"]

    def step(self, tokens: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        out = self.run.step(input_embeds=self.codes[tokens])
        return out["logits"], out["hidden_states"]

    def forced(self, tokens: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Logits and hidden states that predict each of `tokens [rows, n]`."""
        logits, hidden = self.step(tokens[:, :-1])
        return np.concatenate([self.logits[:, -1:], logits], 1), np.concatenate([self.hidden[:, -1:], hidden], 1)


def guide(logits: NDArray[np.float32], scale: float) -> NDArray[np.float32]:
    cond, uncond = np.split(logits, 2)
    return uncond + np.float32(scale) * (cond - uncond)


def greedy(
    target: Target, length: int, scale: float | None, guided: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Greedy ids `[images, length]` and the logits behind them; only the first `guided` tokens are guided."""
    ids, used = [], []
    logits = target.logits[:, -1]
    for k in range(length):
        if scale is None:
            mixed, copies = logits, 1
        else:
            mixed, copies = guide(logits, scale), 2
            if guided is not None and k >= guided:
                mixed = np.split(logits, 2)[0]
        used.append(mixed)
        ids.append(mixed.argmax(-1))
        if k + 1 < length:
            logits = target.step(np.tile(ids[-1], copies)[:, None])[0][:, -1]
    return np.stack(ids, 1), np.stack(used, 1)
