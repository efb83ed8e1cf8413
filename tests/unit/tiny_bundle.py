"""Tiny bundles that run in ONNX Runtime within milliseconds: the next token depends only on the last token.

The graphs have no attention: they write keys and values but never read them. The drafter has the target's weights with
noise, so that some draft tokens are accepted and some are rejected. The image decoder shows each token as a square of
one colour.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from lantern_rt.bundle.files import Bundle, open_bundle
from lantern_rt.bundle.manifest import FORMAT_VERSION
from lantern_rt.bundle.rewrite import write_draft_heads
from lantern_rt.runtime.heads import draft_head_shapes

CODES = 32  # size of the codebook
WIDTH = 8  # size of hidden states
NUM_NEIGHBORS = 8  # neighbours of each code
PREFIX = 4  # positions of a prompt
CAPTION = 6  # size of text embeddings
CELL = 4  # height and width of a token's square, in pixels
SPLIT = {"type": "Split", "pattern": {"Regex": "[a-z]+"}, "behavior": "Removed", "invert": True}
WORDS = ("a", "red", "green", "sphere", "cube", "on", "sand", "snow")
# The graphs are no decoders, so devices cannot run them and the architecture has no meaning.
ARCHITECTURE = {
    "intermediate_size": WIDTH, "norm_eps": 1e-5, "num_heads": 2,
    "rotary": "grid", "rope_style": "interleaved", "rope_base": 1e4, "prefix_rotation": "zero",
}  # fmt: skip
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "num_layers": 1, "num_kv_heads": 2, "head_dim": WIDTH // 2, "vocab_size": CODES,
    "architecture": ARCHITECTURE,
}  # fmt: skip
METHODS: list[dict[str, Any]] = [
    {"method": "eagle", "tree": "chain-3"},
    {"method": "lantern", "tree": "dynamic-6-3-2", "neighbors": 4, "delta": 0.2},
    {"method": "lantern++", "tree": "chain-3", "neighbors": 4, "lambda": 2.0},
]
Axes = tuple[str | int, ...]


def make_tiny_bundle(
    folder: Path, kind: str = "words", grid: int = 6, drafter: bool = True, weight_offset: float = 0.0
) -> Path:
    """Write a bundle with random weights, the same each time; return its folder."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(5)
    table = rng.normal(size=(CODES, WIDTH)).astype(np.float32)
    head = (0.9 * rng.normal(size=(WIDTH, CODES))).astype(np.float32)
    drafter_head = head + (0.3 * rng.normal(size=head.shape)).astype(np.float32)
    _write_decoder(folder / "target.onnx", head + np.float32(weight_offset))
    _write_condition(folder / "condition.onnx", kind, rng)
    _write_vq_decoder(folder / "vq_decoder.onnx", grid, rng)
    np.save(folder / "code_embeddings.npy", table)
    files = {role: f"{role}.onnx" for role in ("target", "condition", "vq_decoder")}
    files["code_embeddings"] = "code_embeddings.npy"
    if drafter:
        _write_decoder(folder / "drafter.onnx", drafter_head, table)
        distances = np.linalg.norm(table[:, None] - table, axis=-1)
        np.fill_diagonal(distances, np.inf)
        neighbors = distances.argsort(1)[:, :NUM_NEIGHBORS]
        np.savez(folder / "neighbors.npz", indices=neighbors.astype(np.uint8))
        files |= {"drafter": "drafter.onnx", "neighbors": "neighbors.npz"}
    if kind == "words":
        vocabulary = {word: i for i, word in enumerate(("<pad>", "<unk>", *WORDS))}
        model = {"type": "WordLevel", "unk_token": "<unk>", "vocab": vocabulary}
        (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "pre_tokenizer": SPLIT, "model": model}))
        files["tokenizer"] = "tokenizer.json"
    prefix = 1 if kind == "class" else PREFIX
    condition: dict[str, Any] = {"kind": kind, "prefix": prefix}
    condition |= {"class": {"classes": 10}, "embeddings": {"caption_dim": CAPTION}}.get(kind, {})
    manifest = {
        "format_version": FORMAT_VERSION,
        "name": "tiny",
        "family": "test",
        "grid_rows": grid,
        "grid_columns": grid,
        "codebook_size": CODES,
        "image_height": grid * CELL,
        "image_width": grid * CELL,
        "neighbors": NUM_NEIGHBORS if drafter else 0,
        "target": SIZES | {"max_positions": prefix + grid**2 + 64},
        "drafter": SIZES if drafter else None,
        "condition": condition,
        "sampling": {"cfg_scale": 2.0, "top_k": 24},
        "decoding": {"methods": METHODS if drafter else []},
        "files": {role: _describe_file(folder, name) for role, name in files.items()},
        "provenance": {"exporter": "test 1", "licence": "Apache-2.0"},
    }
    (folder / "bundle.json").write_text(json.dumps(manifest))
    return folder


def make_heads_bundle(folder: Path) -> Bundle:
    """Write a bundle with random draft heads and without a drafter; return the bundle."""
    rng = np.random.default_rng(6)
    shapes = draft_head_shapes(CODES, WIDTH, 4, 4)
    tables = {name: rng.normal(size=shape).astype(np.float16) for name, shape in shapes.items()}
    return write_draft_heads(open_bundle(make_tiny_bundle(folder, drafter=False)), tables)


def make_order_bundle(folder: Path, num_vectors: int = 3) -> Path:
    """Write a bundle that generates 4 x 4 tokens in groups of up to four per forward pass; return its folder."""
    make_tiny_bundle(folder, "class", grid=4, drafter=False)
    table = np.load(folder / "code_embeddings.npy")
    vectors = np.random.default_rng(8).normal(size=(num_vectors, WIDTH)).astype(np.float32)
    np.save(folder / "code_embeddings.npy", np.concatenate([table, vectors]))
    manifest = json.loads((folder / "bundle.json").read_text())
    groups = [[0], [2], [8], [10], [1, 3, 9, 11], [4, 6, 12, 14], [5, 7, 13, 15]]
    manifest["order"] = {"groups": groups, "vectors": 3}
    manifest["presets"] = {"strict": {"method": {"method": "groups"}}}
    manifest["files"]["code_embeddings"] = _describe_file(folder, "code_embeddings.npy")
    (folder / "bundle.json").write_text(json.dumps(manifest))
    return folder


def _describe_file(folder: Path, name: str) -> dict[str, Any]:
    data = (folder / name).read_bytes()
    return {"path": name, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def _write_decoder(path: Path, head: NDArray[np.float32], table: NDArray[np.float32] | None = None) -> None:
    """Write the graph of a target, or of a drafter if `table`, its embeddings of codes, is given."""
    heads = SIZES["num_kv_heads"]
    width = SIZES["head_dim"]
    kv = (heads, width)
    rows = ("rows", "nodes", WIDTH)
    inputs: dict[str, Axes] = {"input_embeds": rows} if table is None else {"target_hidden": rows}
    ids = {"position_ids": ("rows", "nodes")} | ({} if table is None else {"input_ids": ("rows", "nodes")})
    inputs |= {"attention_mask": ("rows", 1, "nodes", "columns")}
    inputs |= {f"past_key_values.0.{part}": ("past", "rows", *kv) for part in ("key", "value")}
    x = "input_embeds" if table is None else "embedded"
    nodes = [] if table is None else [helper.make_node("Gather", ["table", "input_ids"], [x])]
    nodes += [
        helper.make_node("MatMul", [x, "head"], ["logits"]),
        helper.make_node("Identity", [x], ["hidden_states"]),
        helper.make_node("Reshape", [x, "split"], ["heads"]),
        helper.make_node("Transpose", ["heads"], ["new_key_values.0.key"], perm=[1, 0, 2, 3]),
        helper.make_node("Identity", ["new_key_values.0.key"], ["new_key_values.0.value"]),
    ]
    outputs: dict[str, Axes] = {"logits": ("rows", "nodes", CODES), "hidden_states": rows}
    outputs |= {f"new_key_values.0.{part}": ("nodes", "rows", *kv) for part in ("key", "value")}
    weights: dict[str, NDArray[Any]] = {"head": head, "split": np.array([0, 0, heads, width])}
    if table is not None:
        weights["table"] = table
    _save_graph(path, nodes, inputs, ids, outputs, weights)


def _write_condition(path: Path, kind: str, rng: np.random.Generator) -> None:
    prefix = 1 if kind == "class" else PREFIX
    rows: Axes = ("rows", prefix, WIDTH)
    nodes = [helper.make_node("Mul", ["prefix_embeds", "zero"], ["uncond_embeds"])]
    weights: dict[str, NDArray[Any]] = {"zero": np.zeros(1, np.float32)}
    inputs: dict[str, Axes] = {}
    ids: dict[str, Axes] = {}
    if kind == "embeddings":
        inputs = {"caption_embeds": ("rows", prefix, CAPTION)}
        ids = {"caption_mask": ("rows", prefix)}
        weights["map"] = rng.normal(size=(CAPTION, WIDTH)).astype(np.float32)
        nodes.insert(0, helper.make_node("MatMul", ["caption_embeds", "map"], ["prefix_embeds"]))
    elif kind == "class":
        ids = {"class_ids": ("rows",)}
        weights["table"] = rng.normal(size=(10, 1, WIDTH)).astype(np.float32)
        nodes.insert(0, helper.make_node("Gather", ["table", "class_ids"], ["prefix_embeds"]))
    else:  # the embedding of each position depends on all words
        ids = {"token_ids": ("rows", prefix)}
        words = np.vstack([np.zeros((2, WIDTH)), rng.normal(size=(len(WORDS), WIDTH))])
        weights |= {"table": words.astype(np.float32), "axes": np.array([1])}
        nodes.insert(0, helper.make_node("Gather", ["table", "token_ids"], ["words"]))
        nodes.insert(1, helper.make_node("ReduceSum", ["words", "axes"], ["sum"], keepdims=1))
        nodes.insert(2, helper.make_node("Add", ["words", "sum"], ["prefix_embeds"]))
    _save_graph(path, nodes, inputs, ids, {"prefix_embeds": rows, "uncond_embeds": rows}, weights)


def _write_vq_decoder(path: Path, grid: int, rng: np.random.Generator) -> None:
    side = grid * CELL
    nodes = [
        helper.make_node("Gather", ["palette", "codes"], ["colours"]),
        helper.make_node("Transpose", ["colours"], ["planes"], perm=[0, 2, 1]),
        helper.make_node("Reshape", ["planes", "cells"], ["small"]),
        helper.make_node("Tile", ["small", "repeats"], ["large"]),
        helper.make_node("Reshape", ["large", "whole"], ["images"]),
    ]
    weights: dict[str, NDArray[Any]] = {
        "palette": rng.uniform(-1, 1, (CODES, 3)).astype(np.float32),
        "cells": np.array([-1, 3, grid, 1, grid, 1]),
        "repeats": np.array([1, 1, 1, CELL, 1, CELL]),
        "whole": np.array([-1, 3, side, side]),
    }
    _save_graph(path, nodes, {}, {"codes": ("rows", grid**2)}, {"images": ("rows", 3, side, side)}, weights)


def _save_graph(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, Axes],
    ids: dict[str, Axes],
    outputs: dict[str, Axes],
    weights: dict[str, NDArray[Any]],
) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, axes) for name, axes in inputs.items()]
    values += [helper.make_tensor_value_info(name, TensorProto.INT64, axes) for name, axes in ids.items()]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, axes) for name, axes in outputs.items()]
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, path.stem, values, results, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
