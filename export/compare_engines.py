"""Runs of an engine folder and its bundle on the same forward passes; `verify` compares the outputs.

TensorRT engines are compared with the ONNX graphs that they were built from, on the GPU that they were built for, and
these graphs with the bundle's graphs, in ONNX Runtime on any host.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from ..bundle.files import Bundle
from ..bundle.manifest import DecoderSizes, Precision
from ..engines.columns import CacheColumnMap
from ..engines.contracts import Progress
from ..engines.decoder_tensors import declare_device_tensors
from ..engines.engine_folder import BuiltEngine, EngineFolder, compute_blake2b
from ..engines.ort.engine import OrtEngine
from ..engines.ort.session import GraphSession
from ..engines.profiles import count_profile_columns
from ..engines.trt.builder import set_up_polygraphy
from ..runtime.engine import PassInput
from .compare import CaseResult, convert_float16_to_float32, make_device_inputs
from .graph.graphs import Arrays, make_tree_mask

_ROWS = (1, 4)  # batch sizes to compare; a larger size than the engine's maximum is reduced to this maximum
_TREE = (-1, 0, 0, 1, 1, 2)  # parents of the nodes of a draft tree


def compare_engines(
    bundle: Bundle, folder: EngineFolder, run_engines: bool, progress: Progress
) -> Iterator[tuple[Precision, CaseResult]]:
    """Run the decoders of a bundle, the graphs of its engine folder and, if `run_engines`, the engines.

    Yields the precision of a decoder, and the outputs of one forward pass with the expected outputs.
    """
    for role, spec in bundle.manifest.decoders.items():
        if role not in folder.manifest.graphs:
            continue
        built = folder.manifest.graphs[role]
        graph = folder.folder / f"{role}.onnx"
        if compute_blake2b(graph) != built.onnx:
            raise folder.make_mismatch_error("another graph", "the graph that its engine was built from", graph)
        engine = open_trt_engine(folder.manifest.backend, folder.engine_path(role)) if run_engines else nullcontext()
        with engine as runner:
            for name, feeds, outputs, expected in _run_forward_passes(bundle, role, spec, graph, built):
                progress(f"comparing {role}: {name}", 0, 1)
                yield spec.precision, CaseResult(f"{role}.onnx: {name}", outputs, expected)
                if runner is not None:
                    large_enough = [profile.nodes[2] >= feeds["seen"].shape[1] for profile in built.profiles]
                    runner.set_profile(large_enough.index(True))
                    results = {key: convert_float16_to_float32(array) for key, array in runner.infer(feeds).items()}
                    yield spec.precision, CaseResult(f"{role}.plan: {name}", results, outputs)


def open_trt_engine(backend: str, path: Path) -> Any:
    """Return Polygraphy's runner of a TensorRT engine: a context manager that loads the engine on this host's GPU."""
    trt = set_up_polygraphy(backend)("backend.trt")
    # Polygraphy looks for CUDA's runtime in these folders, but packages of CUDA 13 install it in others.
    cuda = [str(folder) for place in sys.path for folder in Path(place).glob("nvidia/*/lib")]
    os.environ["LD_LIBRARY_PATH"] = ":".join([*cuda, os.environ.get("LD_LIBRARY_PATH", "")])
    return trt.TrtRunner(trt.EngineFromPath(str(path)))


def _run_forward_passes(
    bundle: Bundle, role: str, spec: DecoderSizes, graph_path: Path, built_graph: BuiltEngine
) -> Iterator[tuple[str, Arrays, Arrays, Arrays]]:
    """Run a prefill, a chain of draft tokens and a draft tree, and append their keys and values to the KV cache.

    Yields the name of a pass, inputs and outputs of the engine's graph, and the outputs of the bundle's graph.
    """
    is_drafter = role == "drafter"
    prefix = bundle.manifest.condition.prefix
    path = bundle.path(role)
    rng = np.random.default_rng(0)
    capacity = count_profile_columns(built_graph.profiles)
    tensors = declare_device_tensors(spec, ("float32", "float16"), capacity)
    session = GraphSession(path, *tensors, model_bytes=graph_path.read_bytes())
    table = None if is_drafter else bundle.code_embeddings
    engine = OrtEngine(path, spec, table, None)
    masks = {
        "prefill": np.tri(max(prefix, 2), dtype=bool),
        "chain": np.tri(2, dtype=bool),
        "tree": make_tree_mask(_TREE),
    }
    for rows in sorted({min(rows, built_graph.profiles[0].rows[2]) for rows in _ROWS}):
        cache = engine.make_cache(rows, prefix + 8)
        columns = CacheColumnMap(np.zeros(rows, np.int64), capacity, capacity)
        entry = (rows, spec.num_kv_heads, capacity, spec.head_dim)
        past = {name: np.zeros(entry, dtype) for name, dtype in session.dtypes.items() if name.startswith("past")}
        for name, node_mask in masks.items():
            nodes = len(node_mask)
            start = int(columns.lengths[0])
            codes = rng.integers(0, bundle.manifest.codebook_size, (rows, nodes))
            states = rng.standard_normal((rows, nodes, spec.hidden_size), np.float32) if table is None else table[codes]
            positions = np.tile(start + node_mask.sum(1) - 1, (rows, 1))
            length = engine.past_columns(cache, nodes)
            mask = np.zeros((rows, nodes, length + nodes), bool)
            mask[:, :, :start] = True
            mask[:, :, length:] = node_mask
            batch = (
                PassInput(positions, mask, codes, hidden=states)
                if is_drafter
                else PassInput(positions, mask, embeds=states)
            )
            feeds = make_device_inputs(batch, columns, nodes) | past
            states_name = "hidden" if is_drafter else "embeddings"
            feeds[states_name] = feeds[states_name].astype(session.dtypes[states_name])
            outputs = dict(zip(session.output_names, session.run(feeds), strict=True))
            past = {key: outputs[key.replace("past", "present", 1)] for key in past}
            output = engine.run(batch, cache)
            cache.append(output.new_kv, [np.arange(nodes)] * rows)
            columns.lengths += nodes
            expected = {"logits": np.asarray(output.logits), "hidden_states": np.asarray(output.hidden)}
            widened = {key: convert_float16_to_float32(array) for key, array in outputs.items()}
            yield f"{name}, {rows} rows", feeds, widened, expected
