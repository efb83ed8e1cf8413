"""Decode loop on every engine: complete images, exact distributions, and independence of the batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from engine_backends import BACKENDS, GPU_BACKENDS, SMALL_CONFIG, SmallModel
from scipy.stats import chisquare
from toy_engine import ToyModel, collect_codes, decode, make_plan

from lantern_rt.engines.gpu import find_gpu
from lantern_rt.engines.trt.builder import MODULES, import_library
from lantern_rt.errors import EngineError
from lantern_rt.methods import Autoregressive, Eagle, Lantern, LanternPlusPlus, MethodConfig, Sampling
from lantern_rt.runtime.batch import Batch
from lantern_rt.runtime.decode import select_next_sequences
from lantern_rt.runtime.raster import RasterLayout
from lantern_rt.runtime.state import ImageSequence, Prompt

CODES_PER_IMAGE = SMALL_CONFIG.grid**2
BRANCHING_TREE = "tree-3-210-100"
METHODS = {
    "ar": Autoregressive(),
    "eagle, static": Eagle(tree=BRANCHING_TREE),
    "eagle, dynamic": Eagle(tree="dynamic-6-3-2"),
    "lantern": Lantern(tree="dynamic-6-3-2", neighbors=2, delta=0.2),
    "lantern++": LanternPlusPlus(tree=BRANCHING_TREE, neighbors=2),
}
GUIDED_SAMPLING = Sampling(cfg_scale=2.0, temperature=0.9)
HALF_GUIDED_SAMPLING = Sampling(cfg_scale=2.0, cfg_tokens="50%")
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel(tmp_path_factory.mktemp("small"))


@pytest.fixture(
    scope="module", params=[*BACKENDS, *(pytest.param(name, marks=pytest.mark.gpu) for name in GPU_BACKENDS)]
)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param in GPU_BACKENDS:
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
def model(small_model: SmallModel, backend: str) -> ToyModel:
    return small_model.load_on_backend(backend)


def generate_tokens(
    model: ToyModel, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling, method: MethodConfig
) -> list[list[int]]:
    return collect_codes(decode(model, prompts, seeds, sampling, method), len(prompts))


@every_method
def test_images_do_not_depend_on_the_batch(
    small_model: SmallModel, backend: str, model: ToyModel, method: MethodConfig
) -> None:
    prompts = [small_model.make_prompt(backend, i) for i in range(5)]
    for sampling in (GUIDED_SAMPLING, HALF_GUIDED_SAMPLING):
        batch_codes = generate_tokens(model, prompts, range(5), sampling, method)
        assert [len(codes) for codes in batch_codes] == [CODES_PER_IMAGE] * 5
        for i, prompt in enumerate(prompts):
            assert generate_tokens(model, [prompt], [i], sampling, method) == [batch_codes[i]]


@pytest.mark.parametrize("tree", [BRANCHING_TREE, "dynamic-6-3-2", "chain-2"])
def test_greedy_trees_generate_the_tokens_of_plain_decoding(
    small_model: SmallModel, backend: str, model: ToyModel, tree: str
) -> None:
    greedy = Sampling(cfg_scale=2.0, temperature=0)
    prompts = [small_model.make_prompt(backend, i) for i in range(8)]
    expected = generate_tokens(model, prompts, range(8), greedy, Autoregressive())
    assert generate_tokens(model, prompts, range(8), greedy, Eagle(tree=tree)) == expected


@pytest.mark.parametrize("tree", [BRANCHING_TREE, "dynamic-6-3-2"])
@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt, host"], indirect=True)
def test_sampled_images_have_the_distribution_of_torch(
    small_model: SmallModel, backend: str, model: ToyModel, tree: str
) -> None:
    prompt = small_model.make_prompt(backend, 3)
    num_images = 1000
    batch = 250
    length = 3
    probabilities = small_model.compute_joint_distribution(prompt, GUIDED_SAMPLING).sum(-1).ravel()
    counts = np.zeros(len(probabilities))
    indices = {codes: i for i, codes in enumerate(itertools.product(range(SMALL_CONFIG.vocab_size), repeat=length))}
    for start in range(0, num_images, batch):
        seeds = range(start, start + batch)
        for codes in generate_tokens(
            replace(model, image=RasterLayout(length, SMALL_CONFIG.grid)),
            [prompt] * batch,
            seeds,
            GUIDED_SAMPLING,
            Eagle(tree=tree),
        ):
            counts[indices[tuple(codes)]] += 1
    expected = num_images * probabilities / probabilities.sum()
    is_rare = expected < 8  # the chi-squared test needs larger expected counts, so rare images share a bin
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    assert chisquare(observed, np.append(expected[~is_rare], expected[is_rare].sum())).pvalue > 1e-3


def test_images_that_join_a_batch_have_the_codes_of_one_alone(
    small_model: SmallModel, backend: str, model: ToyModel
) -> None:
    batch = Batch(model)
    codes = [list[int]() for _ in range(7)]
    waiting: list[ImageSequence] = []
    arrivals = [
        (i, method, GUIDED_SAMPLING if i % 2 else Sampling()) for i, method in enumerate([*METHODS.values()][:4])
    ]
    arrivals += [(i, METHODS["eagle, dynamic"], HALF_GUIDED_SAMPLING if i == 5 else GUIDED_SAMPLING) for i in (4, 5, 6)]
    for step in itertools.count():
        for i, method, sampling in arrivals[step : step + 1]:
            plan = make_plan(model.image, sampling, method)
            waiting.append(ImageSequence(i, plan, small_model.make_prompt(backend, i), i))
        if step > len(arrivals) and not batch.active_sequences and not waiting:
            break
        new_sequences = select_next_sequences(batch, waiting, max_images=7, max_rows=8)
        del waiting[: len(new_sequences)]
        for generated_part in batch.add(new_sequences) if new_sequences else batch.step():
            codes[generated_part.sequence] += generated_part.codes.tolist()
    for i, method, sampling in arrivals:
        assert [codes[i]] == generate_tokens(model, [small_model.make_prompt(backend, i)], [i], sampling, method)
