"""Bundles with a text encoder: export, verification, and generation of images from prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_copies import copy_checkpoint
from goldens import DATA, read_manifest
from small_models import save_t5

from lantern_rt import Pipeline
from lantern_rt.cli.main import run_program
from lantern_rt.errors import EngineError
from lantern_rt.export.models.t5 import read_text_encoder
from lantern_rt.inputs import make_install_command
from lantern_rt.text.captions import clean_caption

transformers = pytest.importorskip("transformers")
TARGET = DATA / "lantern-llamagen-hf/t2i"
VQ = DATA / "llamagen-vq/vq_tiny.pt"
DRAFTER = DATA / "lantern-drafter-llamagen"
TOKENIZER = DATA / "tiny-text-tokenizer/tokenizer.json"
PROMPTS = ["A red cube on the SNOW!", "cat", "A photo of the cat, the red cube and the snow, and so on. " * 4]
GREEDY = {"temperature": 0, "cfg_scale": 4, "top_k": 0}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return the folder of a text encoder as wide as the small captions, and its model in transformers."""
    folder = tmp_path_factory.mktemp("t5")
    model = save_t5(folder)
    return folder, model


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, encoder: tuple[Path, Any]) -> Path:
    output = tmp_path_factory.mktemp("bundles") / "text"
    files = ["--target", TARGET, "--vq", VQ, "--drafter", DRAFTER, "--text-encoder", encoder[0], "--output", output]
    assert run_program(["export", "--family", "llamagen", *map(str, files)]) == 0
    return output


def test_the_manifest_has_the_text_condition_and_its_sources(bundle: Path, encoder: tuple[Path, Any]) -> None:
    manifest = read_manifest(bundle)
    assert manifest.condition.model_dump(exclude_none=True) == {"kind": "text", "prefix": 8, "cleaning": "llamagen"}
    assert (bundle / "tokenizer.json").read_bytes() == TOKENIZER.read_bytes()
    roles = [source.role for source in manifest.provenance.sources]
    assert roles == [
        "target_config",
        "target",
        "vq",
        "text_encoder_config",
        "text_encoder_tokenizer",
        "text_encoder",
        "drafter_config",
        "drafter",
    ]


def compute_published_embeddings(
    encoder: tuple[Path, Any], prompt: str, num_positions: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute text embeddings and their mask as LlamaGen's T5 wrapper does, with the classes of `transformers`."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(encoder[0] / "tokenizer.json"), pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    tokens = tokenizer(
        [clean_caption(prompt)],
        max_length=num_positions,
        padding="max_length",
        truncation=True,
        return_attention_mask=True,
        add_special_tokens=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        states = encoder[1](input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state
    return states.numpy(), tokens["attention_mask"].numpy()


@pytest.mark.parametrize("method", ["ar", "eagle"])
def test_prompts_and_their_text_embeddings_give_the_same_codes(
    bundle: Path, lantern_t2i_bundle: Path, encoder: tuple[Path, Any], method: str
) -> None:
    result = Pipeline.from_bundle(bundle, threads=1)(PROMPTS, method=method, **GREEDY)
    embeddings_pipeline = Pipeline.from_bundle(lantern_t2i_bundle, threads=1)
    for prompt, codes in zip(PROMPTS, result.codes, strict=True):
        embeddings_and_mask = compute_published_embeddings(encoder, prompt, 8)
        np.testing.assert_array_equal(
            codes, embeddings_pipeline(embeddings=embeddings_and_mask, method="ar", **GREEDY).codes[0]
        )


def test_the_command_line_generates_an_image_of_a_prompt(program: Any, bundle: Path) -> None:
    (image,) = json.loads(program("run", bundle, PROMPTS[0], "--seed", 3, "--json")[1])["images"]
    assert image["prompt"] == PROMPTS[0]
    assert Path(image["output"]).is_file()
    assert image["codes"] == Pipeline.from_bundle(bundle)(PROMPTS[0], seed=3).codes[0].tolist()


def test_verify_detects_changed_weights_of_the_text_encoder(
    program: Any, bundle: Path, encoder: tuple[Path, Any], tmp_path: Path
) -> None:
    files = ["verify", bundle, TARGET, VQ, DRAFTER]
    code, out, _ = program(*files, encoder[0], "--json")
    rows = json.loads(out)["tensors"]
    assert code == 0
    assert {row["tensor"] for row in rows if row["graph"] == "condition"} == {"prefix_embeds", "uncond_embeds"}
    other_encoder = copy_checkpoint(encoder[0], tmp_path, lambda w: w["encoder.final_layer_norm.weight"].mul_(1.1))
    code, out, _ = program(*files, other_encoder, "--json")
    assert code == 2
    rows = json.loads(out)["tensors"]
    assert [row["tensor"] for row in rows if not row["passed"]] == ["prefix_embeds"]


def test_verify_allows_for_the_rounding_of_a_float16_encoder(program: Any, tmp_path: Path) -> None:
    save_t5(tmp_path / "t5", num_layers=8, d_ff=64, num_heads=4, d_kv=64)
    copy_checkpoint(
        tmp_path / "t5", tmp_path / "half", lambda w: w.update({name: weight.half() for name, weight in w.items()})
    )
    files = ["--target", TARGET, "--vq", VQ, "--text-encoder", tmp_path / "half", "--output", tmp_path / "bundle"]
    assert program("export", *files)[0] == 0
    code, out, _ = program("verify", tmp_path / "bundle", TARGET, VQ, tmp_path / "half", "--json")
    rows = json.loads(out)["tensors"]
    assert code == 0
    (row,) = (row for row in rows if row["tensor"] == "prefix_embeds")
    assert row["difference"] < row["limit"]


def test_without_transformers_the_missing_library_is_named(
    encoder: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match="transformers is not installed") as error:
        read_text_encoder(encoder[0], 32)
    assert error.value.remedy == f"run `{make_install_command('export')}`"
