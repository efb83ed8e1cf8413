"""Graphs to plans, by Polygraphy: a graph in a file, what its inputs may be, and the command lines that do the same.

Networks are strongly typed: every tensor has the type that the graph gives it, so precision is the exporter's
choice. Attention that no kernel takes in one is made of others, so that a graph is built for any GPU.
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
from ...inputs import format_error, format_value
from ...output.files import cache_folder
from ..contracts import Progress, Tensor
from ..device_graph import WORD, device_graph
from ..gpu import find_gpu
from ..profiles import BACKENDS, RTX, Profile, capacity_of
from .executable import first_error

Shape = tuple[int, ...]
Bounds = tuple[Shape, Shape, Shape]  # smallest, the one to tune for, largest
Inputs = dict[str, Bounds]  # of a graph, in one profile
MODULES = {name: name.replace("-", "_") for name in BACKENDS}


def import_library(name: str, module: str | None = None) -> Any:
    """The module of a backend, or another of its extra. Raises: EngineError with the command that installs it."""
    own = module or MODULES[name]
    try:
        found = importlib.import_module(own)
        _ = found.__version__  # any folder of that name on the path would be a module, too
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        problem = f"{own} cannot be imported ({format_error(error, 200)})"
        raise EngineError(problem, remedy=f"install it with `pip install 'lantern-rt[{name}]'`") from error
    return found


def polygraphy_importer(name: str) -> Callable[[str], Any]:
    """What imports Polygraphy's modules, for a backend's library; they say nothing by themselves.

    Raises: EngineError: it is not installed, or in use with the other library, which it does not change any more.
    """
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = str(int(name == RTX))
    package = import_library(name, "polygraphy")
    if (name == RTX) != package.config.USE_TENSORRT_RTX:
        raise EngineError("is in use with another library", field="polygraphy", remedy="take another process")
    logger = importlib.import_module("polygraphy.logger").G_LOGGER
    logger.use_python_logging_system, logger.colors, logger.letter = True, False, False
    logger.module_severity = logger.ERROR
    return lambda module: importlib.import_module(f"polygraphy.{module}")


def write_graph(bundle: Bundle, role: str, profiles: Sequence[Profile], folder: Path) -> list[Inputs] | None:
    """Write `<role>.onnx`, what a plan is built from, beside a link to its weights; returns what its inputs may be.

    None for an image decoder for several sizes, or of integers: the CPU runs that.
    """
    manifest, path, entries = bundle.manifest, bundle.path(role), 0
    if spec := {"target": manifest.target, "drafter": manifest.drafter}.get(role):
        model, inputs, *_ = device_graph(path, spec, role == "drafter", capacity=capacity_of(profiles))
        entries = max(profile.nodes[2] for profile in profiles)
        if role == "target":
            prefixes = entries * max(profile.rows[2] for profile in profiles)
            entries = max(spec.vocab_size, 1 + (manifest.row_end or 0), prefixes)
    elif manifest.sizes or manifest.vq_precision == "int8":
        return None
    else:
        model, inputs = path.read_bytes(), [Tensor("codes", ("int64",), (None, manifest.codes_per_image))]
    (folder / f"{role}.onnx").write_bytes(model)
    if f"{role}.data" in manifest.files:
        weights = bundle.path(f"{role}.data")
        (folder / weights.name).symlink_to(weights.resolve())
    return [
        {tensor.name: shape_bounds(tensor.name, tensor.shape, one, entries) for tensor in inputs} for one in profiles
    ]


def shape_bounds(name: str, shape: Sequence[int | str | None], profile: Profile, entries: int) -> Bounds:
    """Smallest, best and largest shape of a graph input under a profile; fixed sizes stay as they are.

    entries: embeddings that nodes read from, or nodes of the pass whose hidden states they read, at most.
    """
    some: Shape = (1, entries, entries)
    axes: list[Shape] | None = {"embeddings": [some], "hidden": [(1, *profile.rows[1:]), some]}.get(name)
    if axes is None:
        axes = [profile.rows, profile.nodes, tuple(size // WORD for size in profile.columns)]
    low, best, high = (
        tuple(size if isinstance(size, int) else axes[i][which] for i, size in enumerate(shape)) for which in range(3)
    )
    return low, best, high


def build_engine_file(
    name: str, graph: Path, shapes: Sequence[Inputs], gpus: Sequence[str], progress: Progress
) -> Path:
    """Build a plan of a graph in a file, a profile for each of `shapes`, and write it beside the graph.

    gpus: the compute capabilities to build for, of TensorRT-RTX.
    Raises:
        EngineError: the library does not take the graph.
        RequestError: it knows no such GPU.
    """
    library, polygraphy = import_library(name), polygraphy_importer(name)
    trt, errors, timings = polygraphy("backend.trt"), _ErrorCollector(), None
    if name != RTX:  # which times nothing
        timings = timing_cache_path(library.__version__)
    monitor = make_progress_monitor(library, f"building {graph.stem}", progress)
    options = {"profiles": [], "progress_monitor": monitor, "load_timing_cache": timings}
    for inputs in shapes:
        options["profiles"].append(profile := trt.Profile())
        for tensor, bounds in inputs.items():
            profile.add(tensor, *bounds)
    if name == RTX:
        known = [one for one in library.ComputeCapability.__members__ if one.startswith("SM")]
        if odd := [one for one in gpus if one not in known]:
            raise RequestError(
                field="compute_capability", found=format_value(odd[0]), expected=f"one of {', '.join(known)}"
            )
        capabilities = [(int(one[2:-1]), int(one[-1])) for one in gpus]
        config = polygraphy("backend.tensorrt_rtx").CreateConfigRTX(compute_capabilities=capabilities, **options)
    else:
        config = trt.CreateConfig(**options)
    tf32 = library.BuilderFlag.TF32  # float32 is what a float32 bundle promises
    config = trt.PostprocessConfig(config, lambda builder, network, config: config.clear_flag(tf32))
    network = trt.SetDecomposableAttentions(trt.NetworkFromOnnxPath(str(graph)))
    logging.getLogger("Polygraphy").addFilter(errors)
    try:
        with warnings.catch_warnings(action="ignore"):  # Polygraphy calls what TensorRT-RTX has deprecated
            plan = trt.EngineBytesFromNetwork(network, config, save_timing_cache=timings)()
    except polygraphy("exception").PolygraphyException as error:
        if monitor.interrupted:
            raise KeyboardInterrupt from error
        said = [
            one for one in errors.messages if one.startswith("In node")
        ] or errors.messages  # the parser's own words
        problem = f"{name} {library.__version__} does not build this graph: {first_error(said)}"
        remedy = "try smaller --max-rows or --max-nodes, or by hand: --dry-run prints how"
        raise EngineError(problem, field=graph.name, remedy=remedy) from error
    finally:
        logging.getLogger("Polygraphy").removeFilter(errors)
    file = graph.with_suffix(".plan")
    file.write_bytes(memoryview(plan))
    return file


def timing_cache_path(version: str) -> str | None:
    """The file of what kernels took on this GPU, which Polygraphy locks; None where there is no folder for it."""
    gpu = find_gpu()
    with suppress(OutputError, OSError):
        folder = cache_folder() / "timings"
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder / f"{version}-{gpu.name if gpu else None}.bin".replace("/", "-"))
    return None


def build_commands(
    name: str, bundle: Bundle, role: str, shapes: Sequence[Inputs], gpus: Sequence[str], folder: Path
) -> list[str]:
    """The lines that build the plan of a graph in a folder: with Polygraphy, run and compared here; and without.

    ONNX Runtime follows no links to weights: Polygraphy reads them from the bundle.
    """
    graph, plan = folder / f"{role}.onnx", folder / f"{role}.plan"
    run = ["polygraphy", "run", f"{graph}", "--external-data-dir", f"{bundle.path(role).parent}", "--trt", "--onnxrt"]
    run += ["--decomposable-attentions", "--save-engine", f"{plan}"]
    build = ["trtexec", f"--onnx={graph}", f"--saveEngine={plan}", "--noTF32"]
    if name == RTX:
        run = ["env", "POLYGRAPHY_USE_TENSORRT_RTX=1", *run]
        build[0] = "tensorrt_rtx"
        build += ["--skipInference", f"--computeCapabilities={','.join(one[2:] for one in gpus)}"]
    for number, inputs in enumerate(shapes):
        build.append(f"--profile={number}")
        for which, word in enumerate(("min", "opt", "max")):
            sizes = {tensor: [*map(str, bounds[which])] for tensor, bounds in inputs.items()}
            listed = [f"{one}:[{','.join(size)}]" for one, size in sizes.items()]
            run += [f"--trt-{word}-shapes", *listed]
            build.append(f"--{word}Shapes=" + ",".join(f"{one}:{'x'.join(size)}" for one, size in sizes.items()))
    for inputs in shapes[-1:]:  # what is run: the largest profile's best
        run += ["--input-shapes", *(f"{one}:[{','.join(map(str, bounds[1]))}]" for one, bounds in inputs.items())]
    return [shlex.join(run), shlex.join(build)]


class _ErrorCollector(logging.Filter):
    """Keeps the errors that are logged, of which an EngineError tells; nothing is printed."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            self.messages.append(record.getMessage())
        return False


def make_progress_monitor(library: Any, what: str, progress: Progress) -> Any:
    """A progress monitor that passes on what has no parent but the build itself, and stops the build on Ctrl-C.

    `interrupted` on the result tells that it did: an exception must not cross the library's own frames.
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
                    progress(f"{what}: {name[0].lower()}{name[1:]}", step + 1, self._steps[name])
            except KeyboardInterrupt:
                self.interrupted = True
            return not self.interrupted

        def phase_finish(self, name: str) -> None:
            self._steps.pop(name, None)

    return Monitor()
