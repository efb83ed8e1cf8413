"""Test that SGLang's pipeline stage for GLM-Image gets its codes from a running server.

The stage comes from the wheel of SGLang. All other modules of SGLang and diffusers are replaced by stubs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from running_server import RunningServer

from lantern_rt import Pipeline

torch = pytest.importorskip("torch")
requests = pytest.importorskip("requests", reason="needs requests, which SGLang's stage imports")
STAGE = "sglang/multimodal_gen/runtime/pipelines_core/stages/model_specific_stages/glm_image.py"
FOLDER = Path(__file__).parent.parent / "data/glm-image"
TRACES = [trace for trace in json.loads((FOLDER / "traces.json").read_text()) if trace["name"] != "i2i"]


class StubModule(ModuleType):
    """A module in which every attribute exists: an empty class, or the number 32 for upper-case names."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "current_platform":
            return SimpleNamespace(get_local_torch_device=lambda: torch.device("cpu"))
        if name == "init_logger":
            return lambda name: SimpleNamespace(error=print, info=print)
        return 32 if name.isupper() else type(name, (), {})


class StubFinder(MetaPathFinder, Loader):
    """An import hook that replaces every module of SGLang and diffusers by a stub."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ("sglang", "diffusers") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@pytest.fixture(scope="module")
def stage_module() -> Iterator[Any]:
    """Import the module with SGLang's stage for GLM-Image; remove all stubs from `sys.modules` afterwards."""
    try:
        file = importlib.metadata.distribution("sglang").locate_file(STAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs SGLang: pip install --no-deps sglang")
    modules_before = {*sys.modules}
    sys.meta_path.insert(0, finder := StubFinder())
    try:
        spec = importlib.util.spec_from_file_location("glm_image_stage", str(file))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.meta_path.remove(finder)
        for name in {*sys.modules} - modules_before:
            if name.split(".")[0] in ("sglang", "diffusers"):
                del sys.modules[name]


class ProcessorOutput(dict[str, Any]):
    """A stand-in for the processor output of transformers."""

    def to(self, device: Any) -> ProcessorOutput:
        return self


class RecordedProcessor:
    """A stand-in for the processor of GLM-Image, which returns the recorded token ids of a prompt."""

    def apply_chat_template(self, messages: Any, target_h: int, target_w: int, **_: Any) -> ProcessorOutput:
        prompt = messages[0]["content"][-1]["text"]
        (trace,) = (candidate for candidate in TRACES if candidate["prompt"] == prompt)
        assert (target_h, target_w) == (trace["height"], trace["width"])
        grids = [[1, *trace["large_grid"]], [1, *trace["small_grid"]]]
        return ProcessorOutput(input_ids=torch.tensor([trace["prompt_ids"]]), image_grid_thw=torch.tensor(grids))


def test_the_glm_image_stage_of_sglang_gets_the_codes_of_the_pipeline(
    stage_module: Any, start_server: Callable[..., RunningServer], glm_image_bundle: Path
) -> None:
    url = start_server(glm_image_bundle, "--threads", 1).url
    server = SimpleNamespace(srt_encoder_url=url, srt_encoder_connect_timeout=3.05, srt_encoder_timeout=100)
    glm_stage = stage_module.GlmImageAR.__new__(stage_module.GlmImageAR)
    glm_stage.processor = RecordedProcessor()
    pipe = Pipeline.from_bundle(glm_image_bundle, threads=1)

    def compute_prior_ids(trace: dict[str, Any], seed: int) -> list[int]:
        """Return the codes of the large grid, each repeated in 2 x 2 cells, in raster order."""
        size = f"{trace['width']}x{trace['height']}"
        (codes,) = pipe(token_ids=trace["prompt_ids"], size=size, seed=seed, temperature=1.0).codes
        grid = codes[-len(trace["prior_token_ids"]) // 4 :].reshape(trace["large_grid"])
        ids: list[int] = grid.repeat(2, 0).repeat(2, 1).ravel().tolist()
        return ids

    for trace in TRACES[:3]:
        stage_fields = {"height": trace["height"], "width": trace["width"], "server_args": server}
        ids, _, usage = glm_stage.generate_prior_tokens(prompt=trace["prompt"], seed=5, **stage_fields)
        assert ids.tolist() == [compute_prior_ids(trace, 5)]
        assert usage["completion_tokens"] == trace["max_new_tokens"] - 1
    first_trace, second_trace = (trace for trace in TRACES if trace["name"].startswith("batch_row"))
    stage_fields = {"height": first_trace["height"], "width": first_trace["width"], "server_args": server}
    prompts = [first_trace["prompt"], second_trace["prompt"], first_trace["prompt"]]
    batch_ids, usages = glm_stage.generate_prior_tokens_batch(prompts=prompts, seeds=[1, 2, None], **stage_fields)
    assert [ids.tolist() for ids in batch_ids[:2]] == [
        [compute_prior_ids(first_trace, 1)],
        [compute_prior_ids(second_trace, 2)],
    ]
    assert usages[2]["prompt_tokens"] == len(first_trace["prompt_ids"])
    with pytest.raises(requests.HTTPError):
        glm_stage._request_external_ar({"input_ids": [1], "image_data": [], "sampling_params": {}}, server)
