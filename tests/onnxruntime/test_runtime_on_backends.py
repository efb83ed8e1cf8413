"""The decode loop on every engine: complete images, exactness, and independence of the batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from engine_backends import BACKENDS, ON_GPUS, SMALL, SmallModel
from scipy.stats import chisquare
from toy_engine import ToyModel, codes_of, decode, plan_of

from lantern_rt.engines.gpu import find_gpu
from lantern_rt.engines.trt.builder import MODULES, import_library
from lantern_rt.errors import EngineError
from lantern_rt.methods import Autoregressive, Eagle, Lantern, LanternPlusPlus, MethodConfig, Sampling
from lantern_rt.runtime.batch import Batch
from lantern_rt.runtime.decode import select_next_sequences
from lantern_rt.runtime.raster import RasterLayout
from lantern_rt.runtime.state import ImageSequence, Prompt

CODES = SMALL.grid**2
BUSHY = "tree-3-210-100"
METHODS = {
    "ar": Autoregressive(),
    "eagle, static": Eagle(tree=BUSHY),
    "eagle, dynamic": Eagle(tree="dynamic-6-3-2"),
    "lantern": Lantern(tree="dynamic-6-3-2", neighbors=2, delta=0.2),
    "lantern++": LanternPlusPlus(tree=BUSHY, neighbors=2),
}
GUIDED = Sampling(cfg_scale=2.0, temperature=0.9)
HALF = Sampling(cfg_scale=2.0, cfg_tokens="50%")
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module", params=[*BACKENDS, *(pytest.param(name, marks=pytest.mark.gpu) for name in ON_GPUS)])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param in ON_GPUS:
        if find_gpu() is None:
            pytest.skip("needs an NVIDIA GPU and its driver")
        name = request.param.partition(",")[0]
        if name in MODULES:
            try:
                import_library(name)
            except EngineError as error:
                pytest.skip(str(error))
    return str(request.param)


@pytest.fixture(scope="module")
def model(small: SmallModel, backend: str) -> ToyModel:
    return small.model_on(backend)


def generate(
    model: ToyModel, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling, method: MethodConfig
) -> list[list[int]]:
    return codes_of(decode(model, prompts, seeds, sampling, method), len(prompts))


@every_method
@pytest.mark.parametrize("backend", ["tensorrt, host"], indirect=True)
def test_tensorrt_engines_generate_the_tokens_of_onnxruntime(
    small: SmallModel, backend: str, model: ToyModel, method: MethodConfig
) -> None:
    prompts = [small.prompt(backend, i) for i in range(8)]
    for sampling in (GUIDED, HALF):
        plain = generate(small.model_on("onnxruntime"), prompts, range(8), sampling, method)
        assert generate(model, prompts, range(8), sampling, method) == plain


@every_method
def test_images_do_not_depend_on_the_batch(
    small: SmallModel, backend: str, model: ToyModel, method: MethodConfig
) -> None:
    prompts = [small.prompt(backend, i) for i in range(5)]
    for sampling in (GUIDED, HALF):
        together = generate(model, prompts, range(5), sampling, method)
        assert [len(codes) for codes in together] == [CODES] * 5
        for i, prompt in enumerate(prompts):
            assert generate(model, [prompt], [i], sampling, method) == [together[i]]


@pytest.mark.parametrize("tree", [BUSHY, "dynamic-6-3-2", "chain-2"])
def test_greedy_decoding_with_a_tree_generates_the_tokens_of_plain_decoding(
    small: SmallModel, backend: str, model: ToyModel, tree: str
) -> None:
    greedy = Sampling(cfg_scale=2.0, temperature=0)
    prompts = [small.prompt(backend, i) for i in range(8)]
    plain = generate(model, prompts, range(8), greedy, Autoregressive())
    assert generate(model, prompts, range(8), greedy, Eagle(tree=tree)) == plain


@pytest.mark.parametrize("tree", [BUSHY, "dynamic-6-3-2"])
@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt, host"], indirect=True)
def test_images_have_the_distribution_that_torch_computes(
    small: SmallModel, backend: str, model: ToyModel, tree: str
) -> None:
    prompt = small.prompt(backend, 3)
    num_images = 1000
    batch = 250
    length = 3
    joint = small.joint_distribution(prompt, GUIDED).sum(-1).ravel()
    counts = np.zeros(len(joint))
    indices = {codes: i for i, codes in enumerate(itertools.product(range(SMALL.vocab_size), repeat=length))}
    for start in range(0, num_images, batch):
        seeds = range(start, start + batch)
        for codes in generate(
            replace(model, image=RasterLayout(length, SMALL.grid)), [prompt] * batch, seeds, GUIDED, Eagle(tree=tree)
        ):
            counts[indices[tuple(codes)]] += 1
    expected = num_images * joint / joint.sum()
    rare = expected < 8
    observed = np.append(counts[~rare], counts[rare].sum())
    assert chisquare(observed, np.append(expected[~rare], expected[rare].sum())).pvalue > 1e-3


def test_images_that_join_a_running_batch_do_not_depend_on_it(small: SmallModel, backend: str, model: ToyModel) -> None:
    batch = Batch(model)
    codes = [list[int]() for _ in range(7)]
    waiting: list[ImageSequence] = []
    visits = [(i, method, GUIDED if i % 2 else Sampling()) for i, method in enumerate([*METHODS.values()][:4])]
    visits += [(i, METHODS["eagle, dynamic"], HALF if i == 5 else GUIDED) for i in (4, 5, 6)]
    for step in itertools.count():
        for i, method, sampling in visits[step : step + 1]:
            plan = plan_of(model.image, sampling, method)
            waiting.append(ImageSequence(i, plan, small.prompt(backend, i), i))
        if step > len(visits) and not batch.active_sequences and not waiting:
            break
        new = select_next_sequences(batch, waiting, max_images=7, max_rows=8)
        del waiting[: len(new)]
        for part in batch.add(new) if new else batch.step():
            codes[part.sequence] += part.codes.tolist()
    for i, method, sampling in visits:
        assert [codes[i]] == generate(model, [small.prompt(backend, i)], [i], sampling, method)
