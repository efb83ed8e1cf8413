"""Build TensorRT engines with Polygraphy, from ONNX files and bounds of the shapes of their inputs.

Networks are strongly typed: TensorRT computes in the types of the ONNX graph, so the exporter chooses the precision.
Where no fused kernel supports an Attention operator, TensorRT decomposes it, so that a graph can be built for any GPU.
"""

from __future__ import annotations

import importlib
import logging
import os
import shlex
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...bundle.files import Bundle
from ...errors import EngineError, OutputError, RequestError
from ...inputs import format_error, format_value, make_install_command
from ...output.files import find_cache_folder
from ..columns import MASK_WORD_BITS
from ..contracts import Progress, TensorSpec
from ..device_graph import DeviceGraphOptions, make_device_graph
from ..gpu import find_gpu
from ..profiles import BACKENDS, RTX, ShapeProfile, count_profile_columns
from .executable import format_first_error

Shape = tuple[int, ...]
Bounds = tuple[Shape, Shape, Shape]  # smallest shape, shape that TensorRT optimizes for, largest shape
Inputs = dict[str, Bounds]  # bounds of the inputs of a graph by name, for one optimization profile
MODULES = {name: name.replace("-", "_") for name in BACKENDS}  # names of Python modules by backend


def import_library(backend: str, module: str | None = None) -> Any:
    """Import the module of a backend or of its extra, such as `polygraphy`, or raise EngineError."""
    module = module or MODULES[backend]
    try:
        library = importlib.import_module(module)
        _ = library.__version__  # missing if Python imported a folder of that name
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        problem = f"{module} cannot be imported ({format_error(error, 200)})"
        raise EngineError(problem, remedy=f"install it with `{make_install_command(backend)}`") from error
    return library


def set_up_polygraphy(backend: str) -> Callable[[str], Any]:
    """Set up Polygraphy for a backend, silence its log, and return a function that imports its modules by name."""
    # Polygraphy reads the variable once, when it is first imported.
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = str(int(backend == RTX))
    package = import_library(backend, "polygraphy")
    if (backend == RTX) != package.config.USE_TENSORRT_RTX:
        raise EngineError(
            "this process already uses Polygraphy with another library",
            field="polygraphy",
            remedy="start a new process",
        )
    logger = importlib.import_module("polygraphy.logger").G_LOGGER
    logger.use_python_logging_system = True
    logger.colors = False
    logger.letter = False
    logger.module_severity = logger.ERROR
    return lambda module: importlib.import_module(f"polygraphy.{module}")


def write_device_graph(
    bundle: Bundle, role: str, profiles: Sequence[ShapeProfile], folder: Path
) -> list[Inputs] | None:
    """Write the ONNX graph of a TensorRT engine as `<role>.onnx`, and a link to the weights in the bundle.

    Returns the bounds of the inputs for each profile. None if the graph runs on the CPU and is not written: a VQ
    decoder in int8, or with several image sizes.
    """
    manifest = bundle.manifest
    path = bundle.path(role)
    entries = 0
    if spec := manifest.decoders.get(role):
        entries = max(profile.nodes[2] for profile in profiles)
        capacity = count_profile_columns(profiles)
        options = DeviceGraphOptions(manifest.target.dtype, capacity=capacity, max_nodes=entries)
        model, inputs, *_ = make_device_graph(path, spec, options)
        if spec.role == "target":
            # The input `embeddings` is the table of token embeddings or, for a prefix, has an entry per node and row.
            prefix_entries = entries * max(profile.rows[2] for profile in profiles)
            entries = max(manifest.num_embeddings, prefix_entries)
    elif manifest.decoded_cells is None or manifest.vq_precision == "int8":
        return None
    else:
        model = path.read_bytes()
        inputs = [TensorSpec("codes", ("int64",), (None, manifest.decoded_cells))]
    (folder / f"{role}.onnx").write_bytes(model)
    if f"{role}.data" in manifest.files:
        weights = bundle.path(f"{role}.data")
        (folder / weights.name).symlink_to(weights.resolve())
    return [
        {tensor.name: make_shape_bounds(tensor.name, tensor.shape, profile, entries) for tensor in inputs}
        for profile in profiles
    ]


def make_shape_bounds(
    tensor_name: str, shape: Sequence[int | str | None], profile: ShapeProfile, max_entries: int
) -> Bounds:
    """Return the smallest, optimal and largest shape of an input of a graph for an optimization profile.

    `max_entries` is the maximum size of the first axis of `embeddings`, or of the second axis of `hidden`.
    """
    table_sizes: Shape = (1, max_entries, max_entries)
    axes: list[Shape] | None = {"embeddings": [table_sizes], "hidden": [(1, *profile.rows[1:]), table_sizes]}.get(
        tensor_name
    )
    if axes is None:
        axes = [profile.rows, profile.nodes, tuple(size // MASK_WORD_BITS for size in profile.columns)]
    low, best, high = (
        tuple(size if isinstance(size, int) else axes[i][bound] for i, size in enumerate(shape)) for bound in range(3)
    )
    return low, best, high


def build_engine_file(
    backend: str, graph: Path, profile_bounds: Sequence[Inputs], compute_capabilities: Sequence[str], progress: Progress
) -> Path:
    """Build a TensorRT engine from an ONNX file for each optimization profile, and write it to the same folder.

    Only TensorRT-RTX uses the compute capabilities.

    Raises:
        EngineError: the library rejects the graph.
        RequestError: the library cannot build for a compute capability.
    """
    library = import_library(backend)
    polygraphy = set_up_polygraphy(backend)
    trt = polygraphy("backend.trt")
    errors = _ErrorCollector()
    timings = None
    if backend != RTX:  # TensorRT-RTX does not time kernels during builds
        timings = get_timing_cache_path(library.__version__)
    monitor = make_progress_monitor(library, f"building {graph.stem}", progress)
    options = {"profiles": [], "progress_monitor": monitor, "load_timing_cache": timings}
    for inputs in profile_bounds:
        options["profiles"].append(profile := trt.Profile())
        for tensor, bounds in inputs.items():
            profile.add(tensor, *bounds)
    if backend == RTX:
        known = [gpu for gpu in library.ComputeCapability.__members__ if gpu.startswith("SM")]
        if unknown := [gpu for gpu in compute_capabilities if gpu not in known]:
            raise RequestError(
                field="compute_capability", found=format_value(unknown[0]), expected=f"one of {', '.join(known)}"
            )
        capabilities = [(int(gpu[2:-1]), int(gpu[-1])) for gpu in compute_capabilities]
        config = polygraphy("backend.tensorrt_rtx").CreateConfigRTX(compute_capabilities=capabilities, **options)
    else:
        config = trt.CreateConfig(**options)
    tf32 = library.BuilderFlag.TF32  # cleared, as TF32 would round the operands of float32 matmuls
    config = trt.PostprocessConfig(config, lambda builder, network, config: config.clear_flag(tf32))
    network = trt.SetDecomposableAttentions(trt.NetworkFromOnnxPath(str(graph)))
    logging.getLogger("Polygraphy").addFilter(errors)
    try:
        with warnings.catch_warnings(action="ignore"):  # Polygraphy calls functions that TensorRT-RTX deprecates
            engine = trt.EngineBytesFromNetwork(network, config, save_timing_cache=timings)()
    except polygraphy("exception").PolygraphyException as error:
        if monitor.interrupted:
            raise KeyboardInterrupt from error
        parser_errors = [message for message in errors.messages if message.startswith("In node")]
        first_error = format_first_error(parser_errors or errors.messages)
        problem = f"{backend} {library.__version__} does not build this graph: {first_error}"
        remedy = "try smaller --max-rows or --max-nodes"
        raise EngineError(problem, field=graph.name, remedy=remedy) from error
    finally:
        logging.getLogger("Polygraphy").removeFilter(errors)
    file = graph.with_suffix(".plan")
    file.write_bytes(memoryview(engine))
    return file


def get_timing_cache_path(library_version: str) -> str | None:
    """Return the path of TensorRT's cache of measured times on this GPU, which Polygraphy locks; None: no folder."""
    gpu = find_gpu()
    with suppress(OutputError, OSError):
        folder = find_cache_folder() / "timings"
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder / f"{library_version}-{gpu.name if gpu else None}.bin".replace("/", "-"))
    return None


def format_build_commands(
    backend: str,
    bundle: Bundle,
    role: str,
    profile_bounds: Sequence[Inputs],
    compute_capabilities: Sequence[str],
    folder: Path,
) -> list[str]:
    """Return two shell commands that build the TensorRT engine of a graph.

    The first builds with Polygraphy, and compares outputs of the engine with ONNX Runtime on this host. It reads the
    weights from the bundle, because ONNX Runtime does not follow links to weights. The second builds with the program
    `trtexec` or `tensorrt_rtx` of the library.
    """
    graph = folder / f"{role}.onnx"
    engine = folder / f"{role}.plan"
    run = ["polygraphy", "run", f"{graph}", "--external-data-dir", f"{bundle.path(role).parent}", "--trt", "--onnxrt"]
    run += ["--decomposable-attentions", "--save-engine", f"{engine}"]
    build = ["trtexec", f"--onnx={graph}", f"--saveEngine={engine}", "--noTF32"]
    if backend == RTX:
        run = ["env", "POLYGRAPHY_USE_TENSORRT_RTX=1", *run]
        build[0] = "tensorrt_rtx"
        build += ["--skipInference", f"--computeCapabilities={','.join(gpu[2:] for gpu in compute_capabilities)}"]
    for number, inputs in enumerate(profile_bounds):
        build.append(f"--profile={number}")
        for i, word in enumerate(("min", "opt", "max")):
            sizes = {tensor: [*map(str, bounds[i])] for tensor, bounds in inputs.items()}
            listed = [f"{tensor}:[{','.join(size)}]" for tensor, size in sizes.items()]
            run += [f"--trt-{word}-shapes", *listed]
            build.append(f"--{word}Shapes=" + ",".join(f"{tensor}:{'x'.join(size)}" for tensor, size in sizes.items()))
    for inputs in profile_bounds[-1:]:  # compare at the optimal shapes of the largest profile
        run += ["--input-shapes", *(f"{tensor}:[{','.join(map(str, bounds[1]))}]" for tensor, bounds in inputs.items())]
    return [shlex.join(run), shlex.join(build)]


class _ErrorCollector(logging.Filter):
    """Logging filter that collects error messages for an `EngineError`, and suppresses all output."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            self.messages.append(record.getMessage())
        return False


def make_progress_monitor(library: Any, description: str, progress: Progress) -> Any:
    """Return a monitor that reports the progress of a build, and stops the build on Ctrl-C.

    Only the two outermost levels of build phases are reported. The attribute `interrupted` is True if Ctrl-C stopped
    the build. It replaces KeyboardInterrupt, because an exception must not pass through the library.
    """

    class Monitor(library.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.interrupted = False
            self._steps: dict[str, int] = {}

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            if parent is None or len(self._steps) == 1:
                self._steps[name] = steps

        def step_complete(self, name: str, step: int) -> bool:
            try:
                if name in self._steps:
                    progress(f"{description}: {name[0].lower()}{name[1:]}", step + 1, self._steps[name])
            except KeyboardInterrupt:
                self.interrupted = True
            return not self.interrupted

        def phase_finish(self, name: str) -> None:
            self._steps.pop(name, None)

    return Monitor()
