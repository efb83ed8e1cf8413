"""Members of TensorRT and TensorRT-RTX classes that engines use, which the installed libraries must have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lantern_rt.bundle.files import open_bundle
from lantern_rt.engines.contracts import TensorSpec
from lantern_rt.engines.gpu import find_gpu
from lantern_rt.engines.ort.device import OrtDevice
from lantern_rt.engines.ort.session import GraphSession
from lantern_rt.engines.profiles import ShapeProfile
from lantern_rt.engines.trt.backend import MEMORY
from lantern_rt.engines.trt.builder import MODULES, build_engine_file, import_library, write_device_graph
from lantern_rt.engines.trt.engine import TensorRTFunction
from lantern_rt.engines.trt.executable import TensorRTExecutable
from lantern_rt.errors import EngineError

USED_MEMBERS = {
    "Runtime": ["deserialize_cuda_engine"],
    "ICudaEngine": [
        "num_optimization_profiles", "num_io_tensors", "get_tensor_name", "get_tensor_mode", "get_tensor_dtype",
        "get_tensor_shape", "create_execution_context",
    ],
    "IExecutionContext": [
        "set_optimization_profile_async", "set_input_shape", "get_tensor_shape", "set_tensor_address",
        "execute_async_v3",
    ],
    "ExecutionContextAllocationStrategy": ["ON_PROFILE_CHANGE"],
    "TensorIOMode": ["INPUT", "OUTPUT"],
    "DataType": ["FLOAT", "HALF", "BF16", "INT32", "INT64"],
    "ILogger": ["ERROR", "INTERNAL_ERROR"],
    "BuilderFlag": ["TF32"],
}  # fmt: skip
RTX_MEMBERS = {  # only in TensorRT-RTX, which compiles kernels while an engine runs
    "ICudaEngine": ["create_runtime_config"],
    "IRuntimeConfig": [
        "set_execution_context_allocation_strategy", "create_runtime_cache", "set_runtime_cache",
        "cuda_graph_strategy",
    ],
    "CudaGraphStrategy": ["WHOLE_GRAPH_CAPTURE"],
    "IRuntimeCache": ["serialize", "deserialize"],
}  # fmt: skip


@pytest.fixture(params=MODULES)
def library_name(request: pytest.FixtureRequest) -> str:
    try:
        import_library(request.param)
    except EngineError as error:
        pytest.skip(str(error))
    return str(request.param)


@pytest.mark.parametrize("class_name", USED_MEMBERS)
def test_tensorrt_has_every_member_that_engines_use(library_name: str, class_name: str) -> None:
    library = import_library(library_name)
    assert [member for member in USED_MEMBERS[class_name] if not hasattr(getattr(library, class_name), member)] == []


@pytest.mark.parametrize("class_name", RTX_MEMBERS)
def test_tensorrt_rtx_has_the_members_that_store_kernels(class_name: str) -> None:
    library = pytest.importorskip("tensorrt_rtx", reason="needs lantern-rt[tensorrt-rtx]")
    assert [member for member in RTX_MEMBERS[class_name] if not hasattr(getattr(library, class_name), member)] == []
    signatures = library.ICudaEngine.create_execution_context.__doc__
    assert "runtime_config: tensorrt_rtx_bindings.tensorrt_rtx.IRuntimeConfig" in signatures


def load_image_decoder(
    library_name: str, bundle: Path, folder: Path, provider: str
) -> tuple[TensorRTFunction, GraphSession]:
    scenes_bundle = open_bundle(bundle)
    manifest = scenes_bundle.manifest
    profiles = (ShapeProfile(name="rows", rows=(1, 1, 1), nodes=(0, 0, 0), columns=(0, 0, 0)),)
    graph_inputs = write_device_graph(scenes_bundle, "vq_decoder", profiles, folder)
    assert graph_inputs is not None
    gpu = find_gpu()
    compute_capabilities = (gpu.compute_capability if gpu else "SM89",)
    plan_path = build_engine_file(
        library_name, folder / "vq_decoder.onnx", graph_inputs, compute_capabilities, lambda stage, done, total: None
    )
    inputs = [TensorSpec("codes", ("int64",), (None, manifest.codes_per_image))]
    outputs = [TensorSpec("images", ("float32",), (None, 3, manifest.image_height, manifest.image_width))]
    onnx_session = GraphSession(scenes_bundle.path("vq_decoder"), inputs, outputs)
    executable = TensorRTExecutable(import_library(library_name), plan_path, profiles, "again")
    return TensorRTFunction(executable, inputs, outputs, OrtDevice(provider)), onnx_session


@pytest.mark.skipif(find_gpu() is not None, reason="there is a GPU and driver here")
def test_loading_without_a_cuda_driver_names_the_driver(float_scenes_bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs lantern-rt[tensorrt-rtx]")
    with pytest.raises(EngineError) as caught:
        load_image_decoder("tensorrt-rtx", float_scenes_bundle, tmp_path, "cpu")
    assert "CUDA driver version is insufficient" in caught.value.problem


@pytest.mark.gpu
def test_an_engine_on_a_gpu_decodes_the_images_of_onnx_runtime(
    library_name: str, float_scenes_bundle: Path, tmp_path: Path
) -> None:
    if find_gpu() is None:
        pytest.skip("needs an NVIDIA GPU and its driver")
    engine_function, onnx_session = load_image_decoder(library_name, float_scenes_bundle, tmp_path, MEMORY)
    codes = np.random.default_rng(0).integers(0, 16, (3, onnx_session.session.get_inputs()[0].shape[1]))
    np.testing.assert_allclose(
        engine_function.run({"codes": codes})[0], onnx_session.run({"codes": codes})[0], atol=1e-3
    )
