"""Runs of a graph file and of its reference, the PyTorch module or ONNX's evaluator; `verify` compares the outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..bundle.manifest import Manifest
from ..engines.columns import CacheColumnMap, compute_padded_node_count, pad_nodes
from ..engines.contracts import Progress
from ..engines.device_graph import DeviceGraphOptions, make_device_graph
from ..engines.graph_writer import choose_column_part_shape
from ..engines.host import import_onnxruntime
from ..engines.ort.session import open_session
from ..errors import BundleError
from ..inputs import convert_read_errors, format_value
from ..runtime.engine import PassInput
from .checkpoints.deferred import compute_deferred_tensor, defer_tensor
from .graph.graph_file import GraphFile
from .graph.graphs import HIDDEN, Arrays, Graph
from .graph.onnx_ops import TWO_INTEGERS
from .graph.precision import fake_quantize, round_activations
from .models.decoder import LayerStack
from .progress import ignore_progress

onnxruntime: Any = import_onnxruntime()

_MIN_HALF = -6e4  # replaces lower numbers of masks in float16
_MAX_INPUT = 1 << 28  # maximum size of a random input, as a damaged graph may declare any size


class CaseResult(NamedTuple):
    """Outputs of a graph and of its reference on one test case, by name."""

    case_name: str
    outputs: Arrays
    expected_outputs: Arrays


def compare_graph_with_module(
    graph: Graph,
    path: Path,
    test_cases: Sequence[str] | None = None,
    graph_file: GraphFile | None = None,
    low_memory: bool = False,
    progress: Progress = ignore_progress,
) -> Iterator[CaseResult]:
    """Run a graph file in ONNX Runtime and its module in PyTorch, on the CPU, on test cases (None: all).

    A decoder's file runs twice: as it is, and in the device layout that accelerators use. To save memory, the module
    converts each weight to float32 only when it is used, rounded as in `graph_file`. With `low_memory`, the file runs
    without optimizations, and its weights stay memory-mapped.

    Raises:
        BundleError: the file does not run.
    """
    names = [*graph.test_cases] if test_cases is None else test_cases
    layouts: dict[str, Callable[[], GraphFileSession | DeviceGraphSession]] = {
        "": partial(GraphFileSession, path, low_memory)
    }
    if isinstance(graph.module, LayerStack):
        layouts[", device layout"] = partial(DeviceGraphSession, graph, path, low_memory)
    report = partial(progress, f"comparing {path.name}")
    total = (len(layouts) + 1) * len(names)
    done = count()
    results: dict[str, list[Arrays]] = {}
    for layout, open_layout in layouts.items():
        results[layout] = []
        with convert_read_errors(path, "a graph that runs", BundleError, "export the bundle again"):
            session = open_layout()
            for name in names:
                report(next(done), total)
                results[layout].append(session.run(graph.test_cases[name]))
            del session  # frees memory for the next session or the module
    for i, name in enumerate(names):
        report(next(done), total)
        expected = run_torch_module(graph, graph.test_cases[name], graph_file)
        for layout, outputs in results.items():
            yield CaseResult(f"{name}{layout}", outputs[i], expected)
    report(total, total)


def run_torch_module(
    graph: Graph, inputs: Arrays, graph_file: GraphFile | None = None, dtype: torch.dtype = torch.float32
) -> Arrays:
    """Run a graph's module on one test case, in `dtype` and with weights rounded as in `graph_file`."""
    with torch.no_grad(), convert_weights(graph.module, graph_file, dtype):
        result = graph.module(*(torch.from_numpy(inputs[value.name]) for value in graph.inputs))
    tensors = (result,) if isinstance(result, Tensor) else result
    return {value.name: tensor.numpy() for value, tensor in zip(graph.outputs, tensors, strict=True)}


@contextmanager
def convert_weights(
    module: nn.Module, graph_file: GraphFile | None = None, dtype: torch.dtype = torch.float32
) -> Iterator[None]:
    """Let a module compute in `dtype` with weights rounded as in `graph_file`; None: they are not rounded.

    Each weight is converted when it is used. Of an embedding table, only the rows that are looked up are converted.
    """
    with ExitStack() as undo:
        for prefix, part in module.named_modules():
            if isinstance(part, nn.Embedding):
                convert = partial(_convert_weight, f"{prefix}.weight", graph_file=graph_file, dtype=dtype)
                hook = part.register_forward_hook(lambda *call, convert=convert: convert(call[-1]))
                undo.callback(hook.remove)
                continue
            if isinstance(part, nn.Linear) and _uses_int8_matmul(f"{prefix}.weight", graph_file):
                undo.callback(part.register_forward_pre_hook(lambda _, inputs: round_activations(*inputs)).remove)
            for tensors in (part._parameters, part._buffers):
                for leaf, value in tensors.items():
                    if value is not None and value.is_floating_point():
                        undo.callback(tensors.__setitem__, leaf, value)
                        make = partial(_convert_weight, f"{prefix}.{leaf}".removeprefix("."), value, graph_file, dtype)
                        tensors[leaf] = defer_tensor(make, value.shape, dtype)
        yield


def _uses_int8_matmul(weight_name: str, graph_file: GraphFile | None) -> bool:
    stored = _find_weight_name(weight_name, graph_file)
    storage = graph_file.storage_types[stored] if graph_file and stored else None
    return storage == "columns" and not weight_name.endswith(TWO_INTEGERS)


def _convert_weight(weight_name: str, weight: Tensor, graph_file: GraphFile | None, dtype: torch.dtype) -> Tensor:
    stored = _find_weight_name(weight_name, graph_file)
    if graph_file is None or stored is None:
        return compute_deferred_tensor(weight).float().to(dtype)
    storage = graph_file.storage_types[stored]
    return fake_quantize(weight, storage, stored in graph_file.matrix_names, graph_file.compute_type).to(dtype)


def _find_weight_name(module_weight_name: str, graph_file: GraphFile | None) -> str | None:
    """Return the name that a module's weight has in the graph; None if the graph does not have it."""
    storage_types = graph_file.storage_types if graph_file else {}
    # If the module only wraps the written module, the name in the graph lacks the first part.
    return next(
        (known for known in (module_weight_name, module_weight_name.partition(".")[2]) if known in storage_types), None
    )


class GraphFileSession:
    """Sessions of ONNX Runtime for one graph file, for inputs with and without an empty past.

    ONNX Runtime 1.31 divides by zero in a fused matrix product over an empty tensor. So inputs with an empty tensor run
    in a second session without this fusion. With `low_memory`, weights are read from the memory-mapped file and decoded
    one at a time. `model` is a serialized model to run instead of the file, with weights from the file's folder.
    """

    def __init__(self, path: Path, low_memory: bool = False, model: bytes | None = None) -> None:
        self.path = path
        self.low_memory = low_memory
        self.model = model
        self._sessions: dict[bool, Any] = {}

    def run(self, inputs: Arrays) -> Arrays:
        """Run the graph and return all outputs by name, float16 as float32."""
        empty = not self.low_memory and any(array.size == 0 for array in inputs.values())
        if empty not in self._sessions:
            disabled = ["MatmulTransposeFusion"] if empty else None
            source = self.path if self.model is None else self.model
            self._sessions[empty] = open_session(source, 1, self._set_session_options, disabled_optimizers=disabled)
        session = self._sessions[empty]
        halves = {tensor.name for tensor in session.get_inputs() if tensor.type == "tensor(float16)"}
        outputs = session.run(None, _cast_inputs_to_float16(inputs, halves))
        return dict(
            zip(
                (output.name for output in session.get_outputs()), map(convert_float16_to_float32, outputs), strict=True
            )
        )

    def _set_session_options(self, options: Any) -> None:
        # A serialized model needs the folder of its weights; for a file, ONNX Runtime ignores this option.
        folder = str(self.path.parent)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        # Both features would keep memory after the session is deleted.
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
        if self.low_memory:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
            for step in ("prepacking", "quant_qdq"):  # these steps would decode all weights when the session opens
                options.add_session_config_entry(f"session.disable_{step}", "1")


class DeviceGraphSession:
    """Session of ONNX Runtime for a decoder's file in the device layout, with past entries in random cache columns."""

    def __init__(self, graph: Graph, path: Path, low_memory: bool = False) -> None:
        assert isinstance(graph.module, LayerStack)
        spec = graph.module.make_spec()
        # ONNX Runtime does not compute in bfloat16 on CPUs.
        options = DeviceGraphOptions(graph.compute_type, basic_ops_only=graph.compute_type == "bfloat16")
        device = make_device_graph(path, spec, options)
        self._session = GraphFileSession(path, low_memory, device.model_bytes)
        self._heads = (spec.num_kv_heads, spec.head_dim)

    def run(self, inputs: Arrays) -> Arrays:
        """Inputs and outputs have the names and shapes of the graph file."""
        rows, nodes = inputs["position_ids"].shape
        heads, width = self._heads
        past = inputs["attention_mask"].shape[3] - nodes
        cache = CacheColumnMap(np.full(rows, past), past + nodes)
        # Columns in random sequence show errors that sorted columns would hide.
        num_columns = np.random.default_rng(0).permutation(cache.num_columns - 1)[:past]
        cache.column_of[:] = [*num_columns, *np.setdiff1d(np.arange(cache.num_columns), num_columns)]
        cache.is_sorted = False
        batch = PassInput(
            inputs["position_ids"],
            inputs["attention_mask"][:, 0] == 0,
            inputs.get("input_ids"),
            inputs.get("input_embeds"),
            inputs.get("target_hidden"),
        )
        feeds = make_device_inputs(batch, cache, compute_padded_node_count(nodes))
        for name in [name for name in inputs if name.startswith("past_")]:
            parts = choose_column_part_shape(heads * width)
            feeds[name] = np.zeros((rows, cache.num_columns, *parts), np.float32)
            feeds[name][:, num_columns] = inputs[name].transpose(1, 0, 2, 3).reshape(rows, past, *parts)
        outputs = self._session.run(feeds)
        results = {name: outputs.pop(name)[:, :nodes] for name in ("logits", "hidden_states")}
        for name, array in outputs.items():
            new = array[np.arange(rows)[:, None], cache.written_columns].reshape(rows, nodes, heads, width)
            results[name.replace("present", "new", 1)] = new.transpose(1, 0, 2, 3)
        return results


def make_device_inputs(batch: PassInput, cache_columns: CacheColumnMap, num_padded_nodes: int) -> Arrays:
    """Return the inputs of a graph in the device layout for a forward pass, without past keys and values."""
    rows, nodes = batch.positions.shape
    feeds = cache_columns.encode_pass_inputs(batch, num_padded_nodes)
    ids = pad_nodes(np.arange(rows * nodes).reshape(rows, nodes), num_padded_nodes, np.int32)
    if batch.tokens is None:
        embeds = np.asarray(batch.embeds)
        return feeds | {"token_ids": ids, "embeddings": embeds.reshape(-1, embeds.shape[2])}
    tokens = pad_nodes(batch.tokens, num_padded_nodes, np.int32)
    return feeds | {"token_ids": tokens, "hidden": np.asarray(batch.hidden), "hidden_ids": ids}


def compare_graph_with_onnx_reference(path: Path, manifest: Manifest) -> CaseResult:
    """Run a graph file in ONNX Runtime and in ONNX's reference evaluator on small random inputs.

    The comparison shows errors of ONNX Runtime's fusions and kernels, and needs no checkpoint. It does not show errors
    from rounding weights, because both runs read the same rounded weights.
    """
    from onnx.reference import ReferenceEvaluator

    graph = onnx.load(path, load_external_data=False).graph
    halves = {value.name for value in graph.input if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16}
    inputs = _make_random_inputs(graph.input, manifest)
    outputs = map(
        convert_float16_to_float32, ReferenceEvaluator(str(path)).run(None, _cast_inputs_to_float16(inputs, halves))
    )
    expected = dict(zip((output.name for output in graph.output), outputs, strict=True))
    return CaseResult("", GraphFileSession(path).run(inputs), expected)


def _make_random_inputs(graph_inputs: Iterable[onnx.ValueInfoProto], manifest: Manifest) -> Arrays:
    pixels = 2 * manifest.image_height // manifest.grid_rows  # height of two grid rows
    sizes = {"rows": 2, "nodes": 3, "past": 4, "past + nodes": 7, "images": 1, "height": pixels, "width": pixels}
    limits = {
        "codes": manifest.codebook_size,
        "input_ids": manifest.target.vocab_size,
        "position_ids": manifest.target.max_positions,
        "class_ids": manifest.condition.classes or 1,
    }
    generator = np.random.default_rng(0)
    arrays: Arrays = {}
    for value in graph_inputs:
        tensor = value.type.tensor_type
        shape = [axis.dim_value or sizes.get(axis.dim_param, 2) for axis in tensor.shape.dim]
        if prod(shape) > _MAX_INPUT:
            raise ValueError(f"input {format_value(value.name)} is too large: {format_value(shape)}")
        if tensor.elem_type == onnx.TensorProto.INT64:
            arrays[value.name] = generator.integers(limits.get(value.name, 2), size=shape)
        elif value.name == "attention_mask":  # each new node attends to the past and to the nodes before it
            visible = np.tri(shape[2], shape[3], shape[3] - shape[2], dtype=bool)
            arrays[value.name] = np.broadcast_to(np.where(visible, 0, HIDDEN), shape).astype("f4")
        else:
            arrays[value.name] = generator.standard_normal(shape, np.float32)
    return arrays


def _cast_inputs_to_float16(inputs: Arrays, float16_names: Collection[str]) -> Arrays:
    return {
        name: np.maximum(array, _MIN_HALF).astype(np.float16) if name in float16_names else array
        for name, array in inputs.items()
    }


def convert_float16_to_float32(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.float32) if array.dtype == np.float16 else array
