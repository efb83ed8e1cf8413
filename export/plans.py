"""How far an engine folder is from its bundle, on the same passes: the graphs that plans were built from, which ONNX
Runtime runs on any host, from the bundle's own; and the plans from those graphs, where there is their GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ..bundle.files import Bundle
from ..bundle.manifest import DecoderSpec, DrafterSpec
from ..engines.contracts import Array, Progress
from ..engines.decoder_tensors import device_tensors
from ..engines.engine_folder import BuiltGraph, EngineFolder, file_blake2b
from ..engines.gpu import find_gpu
from ..engines.kv_cache import round_up
from ..engines.ort.engine import OrtEngine
from ..engines.ort.session import GraphSession
from ..engines.profiles import capacity_of
from ..engines.trt.builder import import_polygraphy
from ..runtime.engine import Pass
from .verify import Verification, add_graph

Arrays = dict[str, Array]
ROWS = (1, 4)  # of a batch; where the plan takes fewer, those
PARENTS = (0, 0, 0, 1, 1, 2)  # of a tree's nodes


def verify_plans(bundle: Bundle, folder: EngineFolder, progress: Progress) -> tuple[Verification, str | None]:
    """Compare graphs, and plans if they run here; returns what differs, and why plans were not run.

    Raises:
        EngineError: the folder is another bundle's, or a file in it is not the one that was built.
        BundleError: a graph does not run.
    """
    manifest, gpu = folder.manifest, find_gpu()
    folder.check(bundle, manifest.builder_version)
    reason, here = None, {gpu.name, gpu.compute_capability} if gpu else set()
    if here.isdisjoint([manifest.gpu] if manifest.gpu else manifest.compute_capabilities):
        wanted = manifest.gpu or f"a GPU of {', '.join(manifest.compute_capabilities)}"
        reason = f"they need {wanted}, and here is {gpu.name if gpu else 'none, or no driver'}"
    result = Verification(bundle.manifest.name, bundle.digest, str(folder.folder), bundle.manifest.target.precision)
    specs = {"target": bundle.manifest.target, "drafter": bundle.manifest.drafter}
    with ExitStack() as stack:
        for role, spec in specs.items():
            built = manifest.graphs.get(role)
            if spec is None or built is None:
                continue
            graph = folder.folder / f"{role}.onnx"
            if file_blake2b(graph) != built.onnx:
                raise folder.other("another graph", "the one that its plan was built from", graph)
            runner = None if reason else plan_runner(manifest.backend, folder.path(role), stack)
            for what, feeds, outputs, expected in _passes(bundle, role, spec, graph, built):
                progress(f"comparing {role}: {what}", 0, 1)
                pairs = [("onnx", {name: outputs[name] for name in expected}, expected)]
                if runner is not None:
                    fits = [one.nodes[2] >= feeds["seen"].shape[1] for one in built.profiles]
                    runner.set_profile(fits.index(True))
                    pairs.append(("plan", dict(runner.infer(feeds)), outputs))
                for kind, one, other in pairs:
                    add_graph(f"{role}.{kind}: {what}", [("", one, other)], spec.precision, 0, result)
    return result, reason


def plan_runner(backend: str, path: Path, stack: ExitStack) -> Any:
    """Polygraphy's runner of a plan on this GPU, until the stack is left."""
    trt = import_polygraphy(backend)("backend.trt")
    # It looks for CUDA's runtime where this says, and not where packages of CUDA 13 have it.
    cuda = [str(found) for place in sys.path for found in Path(place).glob("nvidia/*/lib")]
    os.environ["LD_LIBRARY_PATH"] = ":".join([*cuda, os.environ.get("LD_LIBRARY_PATH", "")])
    return stack.enter_context(trt.TrtRunner(trt.EngineFromPath(str(path))))


def _passes(
    bundle: Bundle, role: str, spec: DecoderSpec | DrafterSpec, graph: Path, built: BuiltGraph
) -> Iterator[tuple[str, Arrays, Arrays, Arrays]]:
    """Each pass: what it is, inputs and outputs of the graph that was built, and outputs of the bundle's own."""
    prefix, path, rng = bundle.manifest.condition.prefix, bundle.path(role), np.random.default_rng(0)
    drafts, capacity = role == "drafter", capacity_of(built.profiles)
    tensors = device_tensors(spec, drafts, ("float32", "float16"), capacity)
    session = GraphSession(path, *tensors, model=graph.read_bytes())
    table = None if drafts else bundle.code_embeddings
    engine, tree = OrtEngine(path, spec, table, None), np.eye(len(PARENTS), dtype=bool)
    for node, parent in enumerate(PARENTS[1:], 1):
        tree[node] |= tree[parent]
    kinds = {"prefill": np.tri(max(prefix, 2), dtype=bool), "chain": np.tri(2, dtype=bool), "tree": tree}
    for rows in sorted({min(rows, built.profiles[0].rows[2]) for rows in ROWS}):
        cache, start = engine.new_cache(rows, prefix + 8), 0
        entry = (rows, spec.num_kv_heads, capacity, spec.head_dim)
        past = {name: np.zeros(entry, kind) for name, kind in session.dtypes.items() if name.startswith("past")}
        for kind, among in kinds.items():
            nodes = len(among)
            shape, end = (rows, nodes), start + nodes
            codes = rng.integers(0, bundle.manifest.codebook_size, shape)
            states = rng.standard_normal((*shape, spec.hidden_size), np.float32) if table is None else table[codes]
            positions = np.tile(start + among.sum(1) - 1, (rows, 1))
            seen = np.zeros((*shape, round_up(end)), bool)
            seen[:, :, :start], seen[:, :, start:end] = True, among
            ids = np.arange(rows * nodes, dtype=np.int32).reshape(shape)
            reads = {"hidden": states, "hidden_ids": ids, "token_ids": codes.astype(np.int32)}
            if not drafts:
                reads = {"embeddings": states.reshape(-1, spec.hidden_size), "token_ids": ids}
            name = "hidden" if drafts else "embeddings"
            reads[name] = reads[name].astype(session.dtypes[name])
            words = np.packbits(seen, -1, "little").view("<u2").astype(np.int32)  # [rows, nodes, words]
            feeds = {"position_ids": positions, "write": np.full(rows, start), "seen": words, **reads, **past}
            outputs = dict(zip(session.output_names, session.run(feeds), strict=True))
            past = {name: outputs[name.replace("past", "present", 1)] for name in past}

            length = engine.next_past_length(cache, nodes)
            mask = np.zeros((*shape, length + nodes), bool)
            mask[:, :, :start], mask[:, :, length:] = True, among
            own = Pass(positions, mask, tokens=codes, hidden=states) if drafts else Pass(positions, mask, embeds=states)
            output = engine.run(own, cache)
            cache.append(output.new_kv, [np.arange(nodes)] * rows)
            start = end
            expected = {"logits": np.asarray(output.logits), "hidden_states": np.asarray(output.hidden)}
            yield f"{kind}, {rows} rows", feeds, outputs, expected
