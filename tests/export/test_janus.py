"""Comparisons of a Janus bundle with the model of transformers, with small random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_readers import read_janus
from goldens import GraphRunner, embed_tokens
from refusals import catch_error
from small_janus import CODES, GRID, IMAGE_START_ID, START_ID, WORDS, make_random_janus, write_janus

from lantern_rt import Pipeline
from lantern_rt.cli.main import run_program
from lantern_rt.errors import CheckpointError
from lantern_rt.export.compare import GraphFileSession
from lantern_rt.export.models import exact
from lantern_rt.export.writer import export_model

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model() -> Any:
    return make_random_janus()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the model in several shards with a tokenizer of a few words; return the folder of the checkpoint."""
    checkpoint_folder = tmp_path_factory.mktemp("janus") / "tiny"
    write_janus(model, checkpoint_folder)
    return checkpoint_folder


@pytest.fixture(scope="module")
def bundle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return export_model(read_janus(folder), tmp_path_factory.mktemp("bundles") / "janus")


def make_prompt_ids(words: str) -> list[int]:
    """Return the token ids of a prompt, with the tokens of the template before and after the words."""
    return [START_ID, 15, *(10 + WORDS.index(word) for word in words.split()), 16, IMAGE_START_ID]


def assert_close(values: np.ndarray, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(values, expected.numpy(), rtol=0, atol=tolerance, strict=True)


def test_a_prompt_and_codes_have_the_hidden_states_and_logits_of_transformers(model: Any, bundle: Path) -> None:
    ids = torch.tensor([make_prompt_ids("a red cube"), make_prompt_ids("sand on cube")])
    codes = torch.randint(CODES, (2, 10), generator=torch.Generator().manual_seed(1))
    embeds = torch.cat([model.get_input_embeddings()(ids), model.prepare_embeddings_for_image_generation(codes)], 1)
    hidden = model.model.language_model(inputs_embeds=embeds).last_hidden_state
    run = GraphRunner(bundle, rows=2)
    table = np.load(bundle / "code_embeddings.npy")
    outputs = [run.step(input_embeds=embed_tokens(bundle, ids.numpy())), run.step(input_embeds=table[codes.numpy()])]
    assert_close(np.concatenate([output["hidden_states"] for output in outputs], 1), hidden)
    assert_close(np.concatenate([output["logits"] for output in outputs], 1), model.model.generation_head(hidden), 3e-4)


def test_codes_decode_to_the_images_of_transformers(model: Any, bundle: Path) -> None:
    codes = torch.randint(CODES, (2, GRID**2), generator=torch.Generator().manual_seed(2))
    images = GraphFileSession(bundle / "vq_decoder.onnx").run({"codes": codes.numpy()})["images"]
    assert_close(images, model.decode_image_tokens(codes).permute(0, 3, 1, 2))


@pytest.mark.parametrize("words", ["a red cube on sand", "sand"])
def test_a_greedy_image_has_the_codes_that_transformers_generates(model: Any, bundle: Path, words: str) -> None:
    ids = torch.tensor([make_prompt_ids(words)])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_mode="image", do_sample=False, use_cache=True
    )
    result = Pipeline.from_bundle(bundle, threads=1)(words, temperature=0)
    assert result.settings.sampling.cfg_scale == 5.0
    assert result.codes[0].tolist() == expected[0].tolist()


def test_verify_passes_with_the_checkpoint_and_rejects_a_second_checkpoint(
    bundle: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["verify", str(bundle), str(folder)]
    assert run_program([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    graphs = {"target", "condition", "vq_decoder", "vq_encoder"}
    assert {row["graph"] for row in report["tensors"]} == graphs | {"code_embeddings", "neighbors", "tokenizer"}
    assert [row["agreement"] for row in report["distributions"]] == [1.0]
    assert run_program([*command, str(folder)]) == 2
    assert "expected target (model" in capsys.readouterr().err


@pytest.mark.parametrize(("scale", "expected"), [(None, 5), (3, 3), (0.5, 1)])
def test_guidance_scales_mean_what_transformers_takes_them_for(
    folder: Path, tmp_path: Path, scale: float | None, expected: float
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    settings = json.loads((folder / "generation_config.json").read_text()) | {"guidance_scale": scale}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert read_janus(tmp_path).manifest_fields["sampling"].cfg_scale == expected


@pytest.mark.parametrize(
    ("name", "content", "field"),
    [
        ("generation_config.json", {"bos_token_id": 1}, "generation_config.json: pad_token_id, boi_token_id"),
        ("tokenizer.json", None, ""),
        ("config.json", {"model_type": "chameleon"}, "config.json: model_type"),
    ],
)
def test_the_error_of_an_incomplete_checkpoint_names_the_missing_file_or_field(
    folder: Path, tmp_path: Path, name: str, content: Any, field: str
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(json.dumps(content))
    assert catch_error(CheckpointError, read_janus, tmp_path).field.endswith(field)


def test_exact_matmuls_and_gelu_agree_with_pytorch_and_sums_do_not_depend_on_the_order() -> None:
    rng = np.random.default_rng(0)
    inputs, weight = (np.ldexp(rng.normal(size=size), rng.integers(-9, 9, size)) for size in ((7, 500), (9, 500)))
    bias = rng.normal(size=9)
    permutation = rng.permutation(500)
    products = exact.apply_exact_linear(inputs, exact.split_into_integer_matrices(weight), bias)
    assert np.array_equal(
        products,
        exact.apply_exact_linear(
            inputs[:, permutation], exact.split_into_integer_matrices(weight[:, permutation]), bias
        ),
    )
    scale = np.abs(inputs).max() * np.abs(weight).max()
    np.testing.assert_allclose(products, inputs @ weight.T + bias, rtol=0, atol=1e-10 * scale)
    values = np.linspace(-20, 20, 10_001)
    assert_close(exact.gelu(values), torch.nn.functional.gelu(torch.from_numpy(values)), 3e-8)
