"""How far an engine folder is from its bundle, on the same passes: the graphs that plans were built from, which ONNX
Runtime runs on any host, from the bundle's own; and the plans from those graphs, where there is their GPU."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..bundle.files import Bundle
from ..engines.contracts import Array, Progress, Tensor
from ..engines.engine_folder import BuiltGraph, EngineFolder, file_blake2b
from ..engines.gpu import find_gpu
from ..engines.ort.device import Device
from ..engines.ort.engine import OrtEngine
from ..engines.ort.session import GraphSession
from ..engines.profiles import Profile
from ..engines.trt.builder import import_polygraphy
from ..engines.trt.engine import TensorRTEngine
from ..runtime.engine import Engine, Pass
from .verify import Verification, add_graph

Arrays = dict[str, Array]
Run = Callable[[Arrays], Arrays]
_FLOAT = ("float32",)
ROWS = (1, 4)  # of a batch; where the plan takes fewer, those
PARENTS = (0, 0, 0, 1, 1, 2)  # of a tree's nodes


class RecordedGraph:
    """A graph in a file in a plan's place, in ONNX Runtime. feeds, outputs: of its last pass."""

    def __init__(self, weights: Path, model: bytes, profiles: Sequence[Profile]) -> None:
        """weights: beside this file."""
        self._weights, self._model, self.profiles = weights, model, profiles
        self.feeds, self.outputs = Arrays(), Arrays()

    def check_tensors(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Load it. Raises: BundleError if it has other tensors."""
        self._session = GraphSession(self._weights, inputs, outputs, model=self._model)
        self.dtypes = self._session.dtypes

    def check_size(self, name: str, wanted: int) -> None:
        """Nothing: a graph takes any."""

    def bind(self, values: Mapping[str, Any], record: int | None) -> Callable[[bool], None]:
        """As `Executable`, on the host's memory."""
        memory = Arrays()
        for name, dtype in self.dtypes.items():
            size = prod(shape := values[name].shape()) * np.dtype(dtype).itemsize
            held = (ctypes.c_char * size).from_address(values[name].data_ptr())
            memory[name] = np.frombuffer(held, dtype).reshape(shape)

        def run(recorded: bool) -> None:
            self.feeds = {tensor.name: memory[tensor.name].copy() for tensor in self._session.inputs}
            self.outputs = dict(zip(self._session.output_names, self._session.run(self.feeds), strict=True))
            for name, array in self.outputs.items():
                memory[name][...] = array

        return run

    def forget(self, record: int) -> None:
        """Nothing: none is recorded."""


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
    with ExitStack() as stack:
        for role, built in manifest.graphs.items():
            graph = folder.folder / f"{role}.onnx"
            if file_blake2b(graph) != built.onnx:
                raise folder.other("another graph", "the one that its plan was built from", graph)
            plan = None if reason else plan_runner(manifest.backend, folder.path(role), built, stack)
            spec = {"target": bundle.manifest.target, "drafter": bundle.manifest.drafter}.get(role)
            for what, feeds, outputs, found, expected in _passes(bundle, role, graph, built):
                progress(f"comparing {role}: {what}", 0, 1)
                pairs = [("onnx", found, expected)] + ([("plan", plan(feeds), outputs)] if plan else [])
                for kind, one, other in pairs:
                    precision = spec.precision if spec else "fp32"
                    add_graph(f"{role}.{kind}: {what}", [("", one, other)], precision, 0, result)
    return result, reason


def plan_runner(backend: str, path: Path, built: BuiltGraph, stack: ExitStack) -> Run:
    """Polygraphy's runner of a plan on this GPU, until the stack is left."""
    polygraphy = import_polygraphy(backend)("backend.trt")
    # Polygraphy looks for CUDA's runtime where this says, and not where packages of CUDA 13 have it.
    cuda = [str(found) for place in sys.path for found in Path(place).glob("nvidia/*/lib")]
    os.environ["LD_LIBRARY_PATH"] = ":".join([*cuda, os.environ.get("LD_LIBRARY_PATH", "")])
    runner = stack.enter_context(polygraphy.TrtRunner(polygraphy.EngineFromPath(str(path))))

    def run(feeds: Arrays) -> Arrays:
        nodes = feeds["token_ids"].shape[1] if "token_ids" in feeds else 0
        runner.set_profile(min((one.nodes[2], i) for i, one in enumerate(built.profiles) if one.nodes[2] >= nodes)[1])
        return dict(runner.infer(feeds))

    return run


def _passes(
    bundle: Bundle, role: str, graph: Path, built: BuiltGraph
) -> Iterator[tuple[str, Arrays, Arrays, Arrays, Arrays]]:
    """Each pass: what it is, the graph's inputs and outputs, and of its nodes the graph's and the bundle's outputs."""
    manifest, path, rng = bundle.manifest, bundle.path(role), np.random.default_rng(0)
    if role == "vq_decoder":
        feeds = {"codes": rng.integers(0, manifest.codebook_size, (1, manifest.codes_per_image))}
        pixels = (None, 3, manifest.image_height, manifest.image_width)
        tensors = [Tensor("codes", ("int64",), (None, manifest.codes_per_image))], [Tensor("images", _FLOAT, pixels)]
        yield "a picture", feeds, {"images": GraphSession(path, *tensors).run(feeds)[0]}, {}, {}
        return
    spec, table = (manifest.drafter, None) if role == "drafter" else (manifest.target, bundle.code_embeddings)
    assert spec is not None
    recorded: Any = RecordedGraph(path, graph.read_bytes(), built.profiles)
    engines: tuple[Engine, ...] = (
        TensorRTEngine(recorded, spec, table, Device("cpu")),
        OrtEngine(path, spec, table, None),
    )
    tree = np.eye(len(PARENTS), dtype=bool)
    for node, parent in enumerate(PARENTS[1:], 1):
        tree[node] |= tree[parent]
    kinds = {"prefill": np.tri(manifest.condition.prefix), "chain": np.tri(2), "tree": tree}
    for rows in sorted({min(rows, built.profiles[0].rows[2]) for rows in ROWS}):
        caches = [engine.new_cache(rows, manifest.condition.prefix + 16) for engine in engines]
        for kind, seen in kinds.items():
            among, shape = seen.astype(bool), (rows, len(seen))
            tokens, found = rng.integers(0, manifest.codebook_size, shape), list[Arrays]()
            reads: dict[str, Any] = {
                "tokens": tokens,
                "hidden": rng.standard_normal((*shape, spec.hidden_size), np.float32),
            }
            if table is not None:
                reads = {"embeds": table[tokens]} if kind == "prefill" else {"tokens": tokens}
            for engine, cache in zip(engines, caches, strict=True):
                past = np.arange(engine.next_past_length(cache, len(among))) < cache.lengths[:, None]
                parts = np.broadcast_to(past[:, None], (*shape, past.shape[1])), np.tile(among, (rows, 1, 1))
                mask = np.concatenate(parts, -1)
                output = engine.run(Pass(cache.lengths[:, None] + among.sum(1) - 1, mask, **reads), cache)
                own = slice(None), slice(len(among))  # without what fills a pass up
                found.append({"logits": output.logits[own], "hidden_states": output.hidden[own]})
                cache.append(output.new_kv, [np.arange(2 if kind == "tree" else len(among))] * rows)
            yield f"{kind}, {rows} rows", recorded.feeds, recorded.outputs, *found
