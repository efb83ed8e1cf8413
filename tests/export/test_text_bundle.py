"""From a text encoder's folder to a picture of a prompt; and files that do not belong together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llamagen_golden import DATA, manifest
from refusals import refused
from safetensors.torch import load_file, save_file
from small_models import save_t5

from lantern_rt import Pipeline
from lantern_rt.cli.main import run_program
from lantern_rt.errors import CheckpointError, LanternError, RequestError
from lantern_rt.export.families.llamagen import read_llamagen, read_transformer
from lantern_rt.export.models.eagle import read_drafter
from lantern_rt.export.models.t5 import read_text_encoder
from lantern_rt.text.captions import clean_caption

transformers = pytest.importorskip("transformers")
TEXT, CLASS = DATA / "lantern-llamagen-hf/t2i", DATA / "lantern-llamagen-hf/c2i"
VQ, DRAFTER = DATA / "llamagen-vq/vq_tiny.pt", DATA / "lantern-drafter-llamagen"
TOKENIZER = DATA / "tiny-text-tokenizer/tokenizer.json"
PROMPTS = ["A red cube on the SNOW!", "cat", "A photo of the cat, the red cube and the snow, and so on. " * 4]
GREEDY = {"temperature": 0, "cfg_scale": 4, "top_k": 0}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a text encoder as wide as the small captions, and the same in transformers."""
    folder = tmp_path_factory.mktemp("t5")
    model = save_t5(folder, vocab_size=60)
    shutil.copy(TOKENIZER, folder)
    return folder, model


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, encoder: tuple[Path, Any]) -> Path:
    output = tmp_path_factory.mktemp("bundles") / "text"
    files = ["--target", TEXT, "--vq", VQ, "--drafter", DRAFTER, "--text-encoder", encoder[0], "--output", output]
    assert run_program(["export", "--family", "llamagen", *map(str, files)]) == 0
    return output


def test_the_manifest_says_what_a_text_bundle_takes_and_came_from(bundle: Path, encoder: tuple[Path, Any]) -> None:
    found = manifest(bundle)
    assert found.condition.model_dump(exclude_none=True) == {"kind": "text", "prefix": 8, "cleaning": "llamagen"}
    assert (bundle / "tokenizer.json").read_bytes() == TOKENIZER.read_bytes()
    roles = [source.role for source in found.provenance.sources]
    assert roles == [
        "target",
        "config",
        "vq",
        "drafter",
        "drafter_config",
        "text_encoder",
        "text_encoder_config",
        "text_tokenizer",
    ]


def published_embeddings(encoder: tuple[Path, Any], prompt: str, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Text embeddings and mask as LlamaGen's wrapper makes them, with the classes of `transformers`."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(encoder[0] / "tokenizer.json"), pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    tokens = tokenizer(
        [clean_caption(prompt)],
        max_length=slots,
        padding="max_length",
        truncation=True,
        return_attention_mask=True,
        add_special_tokens=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        states = encoder[1](input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state
    return states.numpy(), tokens["attention_mask"].numpy()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prefix_rows_of_a_prompt_are_those_of_the_embeddings_that_transformers_gives(
    bundle: Path, lantern_t2i_bundle: Path, encoder: tuple[Path, Any], prompt: str
) -> None:
    text, embeddings = (Pipeline.from_bundle(path, threads=1) for path in (bundle, lantern_t2i_bundle))
    (ours,) = text.prefixes(text.engines, text.check(prompt).images)
    given = published_embeddings(encoder, prompt, 8)
    (theirs,) = embeddings.prefixes(embeddings.engines, embeddings.check(embeddings=given).images)
    for row, other in ((ours.cond, theirs.cond), (ours.uncond, theirs.uncond)):
        np.testing.assert_array_equal(row.real, other.real)
        np.testing.assert_allclose(row.embeds, other.embeds, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["ar", "eagle"])
def test_a_batch_of_prompts_gives_the_codes_of_its_embeddings(
    bundle: Path, lantern_t2i_bundle: Path, encoder: tuple[Path, Any], method: str
) -> None:
    found = Pipeline.from_bundle(bundle, threads=1)(PROMPTS, method=method, **GREEDY)
    plain = Pipeline.from_bundle(lantern_t2i_bundle, threads=1)
    for prompt, codes in zip(PROMPTS, found.codes, strict=True):
        given = published_embeddings(encoder, prompt, 8)
        np.testing.assert_array_equal(codes, plain(embeddings=given, method="ar", **GREEDY).codes[0])


def test_the_command_line_draws_a_prompt(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_program(["run", str(bundle), PROMPTS[0], "--seed", "3", "--json"]) == 0
    (image,) = json.loads(capsys.readouterr().out)["images"]
    assert image["prompt"] == PROMPTS[0]
    assert (tmp_path / image["output"]).is_file()
    assert image["codes"] == Pipeline.from_bundle(bundle)(PROMPTS[0], seed=3).codes[0].tolist()


# ---------------------------------------------------------------- wrong pairings


def test_a_bundle_agrees_with_its_text_encoder_and_with_no_other(
    bundle: Path, encoder: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["verify", str(bundle), "--against", str(TEXT), "--vq", str(VQ), "--drafter", str(DRAFTER)]
    assert run_program([*files, "--text-encoder", str(encoder[0]), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["tensors"]
    assert {row["tensor"] for row in rows if row["graph"] == "condition"} == {"prefix_embeds", "uncond_embeds"}
    other = shutil.copytree(encoder[0], tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["encoder.final_layer_norm.weight"] *= 1.1
    save_file(weights, other / "model.safetensors")
    assert run_program([*files, "--text-encoder", str(other), "--json"]) == 2
    rows = json.loads(capsys.readouterr().out)["tensors"]
    assert [row["tensor"] for row in rows if not row["passed"]] == ["prefix_embeds"]
    assert run_program(files) == 2
    assert "--text-encoder: found nothing, expected the folder of the bundle's text" in capsys.readouterr().err


def test_a_text_encoder_of_another_width_is_named(tmp_path: Path) -> None:
    save_t5(tmp_path, d_model=48, vocab_size=60)
    shutil.copy(TOKENIZER, tmp_path)
    with refused(CheckpointError, str(tmp_path), "48", "32", "flan-t5-xl"):
        read_llamagen(TEXT, VQ, text_encoder=tmp_path)


def test_a_text_encoder_for_a_class_model_is_named(tmp_path: Path, encoder: tuple[Path, Any]) -> None:
    with refused(CheckpointError, str(CLASS), "class-conditional", "leave --text-encoder out"):
        read_llamagen(CLASS, VQ, text_encoder=encoder[0])


def test_an_image_tokenizer_with_another_codebook_is_named(tmp_path: Path) -> None:
    weights = torch.load(VQ, weights_only=True)["model"]
    weights["quantize.embedding.weight"] = weights["quantize.embedding.weight"][:64]
    torch.save({"model": weights}, tmp_path / "vq.pt")
    with refused(CheckpointError, f"{tmp_path / 'vq.pt'}: has 64 codes", "128", "give the VQ tokenizer"):
        read_llamagen(TEXT, tmp_path / "vq.pt")


def test_a_drafter_of_another_width_is_named(tmp_path: Path) -> None:
    weights = torch.load(DRAFTER / "pytorch_model.bin", weights_only=True)
    save_file(weights | {"embed_tokens.weight": torch.ones(128, 48)}, tmp_path / "model.safetensors")
    shutil.copy(DRAFTER / "config.json", tmp_path)
    with refused(CheckpointError, f"{tmp_path}: the drafter has 128", "48", "the target 128 of 64"):
        read_drafter(tmp_path, read_transformer(TEXT).decoder)


def test_a_text_encoder_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    save_t5(tmp_path)
    with refused(CheckpointError, f"{tmp_path}: found no tokenizer.json", "save it there"):
        read_text_encoder(tmp_path, 32)
    with refused(CheckpointError, "give the folder of flan-t5-xl"):
        read_text_encoder(tmp_path / "absent", 32)


def test_a_missing_library_is_named(encoder: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused(LanternError, f"{encoder[0]}: transformers is not installed", "pip install 'lantern-rt[export]'"):
        read_text_encoder(encoder[0], 32)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    save_t5(tmp_path)  # 50 tokens, the tokenizer has 56
    shutil.copy(TOKENIZER, tmp_path)
    with refused(CheckpointError, "id 55", "50 tokens", "give the model's own tokenizer"):
        read_text_encoder(tmp_path, 32)
    save_t5(tmp_path, vocab_size=60)
    fields = json.loads(TOKENIZER.read_text("utf-8")) | {"post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    with refused(CheckpointError, "does not end a text with token 1"):
        read_text_encoder(tmp_path, 32)


def test_bundles_asked_for_what_they_do_not_take_say_what_they_take(
    bundle: Path, lantern_c2i_bundle: Path, lantern_t2i_bundle: Path
) -> None:
    text, classes, embeddings = (
        Pipeline.from_bundle(path, threads=1) for path in (bundle, lantern_c2i_bundle, lantern_t2i_bundle)
    )
    for call, words in (
        (lambda: classes("a cube"), ("found a prompt, expected class ids", "tiny-c2i")),
        (lambda: text(class_ids=3), ("found class ids, expected a prompt", "text takes")),
        (lambda: embeddings("a cube"), ("found a prompt, expected text embeddings", "tiny-t2i", "--text-encoder")),
        (lambda: text(), ("found nothing to draw, expected a prompt", "text takes")),
    ):
        with refused(RequestError, *words):
            call()
