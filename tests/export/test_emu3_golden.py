"""Emu3: graphs, prompts, sizes and tokenizers compared with recordings, and layouts of checkpoints."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_copies import EMU3, EMU3_ORIGINAL, copy_checkpoint, copy_published_emu3
from family_readers import read_emu3
from goldens import (
    DATA,
    GUIDED_TOLERANCE,
    PromptRunner,
    assert_close,
    assert_same_bundles,
    load_golden,
    log_softmax,
    mix_guided,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer

from lantern_rt.bundle.conditions import ConditionSpec
from lantern_rt.export.families.common_emu3 import convert_tiktoken, make_emu3_image_size
from lantern_rt.export.families.emu3 import SUFFIX, make_emu3_prompt_layout
from lantern_rt.export.writer import export_model
from lantern_rt.subjects.base import RequestContext
from lantern_rt.subjects.negative_prompt import NegativePrompt
from lantern_rt.text.tokenizers import TemplateTokenizer

CODES = slice(557, 653)  # token ids of the codes
ARRAYS = load_golden("emu3")
TRACES: list[dict[str, Any]] = json.loads((DATA / "emu3" / "traces.json").read_text())
SINGLE_IMAGE_RUNS = [trace for trace in TRACES if trace["name"] != "batch"]


@pytest.mark.parametrize("trace", SINGLE_IMAGE_RUNS, ids=lambda trace: trace["name"])
def test_every_token_of_a_run_has_the_recorded_scores(emu3_bundle: Path, trace: dict[str, Any]) -> None:
    runs = PromptRunner(emu3_bundle, trace["prompt_ids"], trace["unconditional_ids"])
    scores = log_softmax(mix_guided(runs.compute_logits(trace["generated_ids"]), trace["cfg"]))
    rows, columns = trace["grid"]
    is_free = np.array(trace["forced"]) == 0
    # a row end per grid row, and three tokens after the image
    assert is_free.tolist() == ([True] * columns + [False]) * rows + [False] * 3
    assert scores[is_free].argmax(-1).reshape(rows, columns).tolist() == trace["codes"]
    if f"{trace['name']}_scores" in ARRAYS:
        assert_close(scores, log_softmax(ARRAYS[f"{trace['name']}_scores"][:, CODES]), GUIDED_TOLERANCE)


PROTOCOL = json.loads((DATA / "emu3/protocol.json").read_text())


@pytest.fixture(scope="module")
def original_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return copy_published_emu3(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def tokenizers(original_folders: tuple[Path, Path]) -> dict[str, Tokenizer]:
    """Return the tokenizers for bundles, by checkpoint layout: `hf` of transformers, `original` of BAAI."""
    models = {"hf": read_emu3(EMU3, grid=4), "original": read_emu3(*original_folders, grid=4)}
    return {name: Tokenizer.from_buffer(model.extra_files["tokenizer"][1]) for name, model in models.items()}


# ---------------------------------------------------------------- layouts


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(read_emu3(EMU3, grid=4), tmp_path_factory.mktemp("export") / "emu3")


def test_both_published_layouts_give_the_same_bundle(
    bundle: Path, original_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    original_model = read_emu3(*original_folders, grid=4)
    assert_same_bundles(bundle, export_model(original_model, tmp_path / "emu3"), differing_role="tokenizer")
    roles = ["target_config", "target_tokenizer", "target_tokenizer", "target", "vq"]
    assert [role for role, _ in original_model.sources] == roles


def test_a_checkpoint_of_transformers_5_gives_the_same_bundle(bundle: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.Emu3ForConditionalGeneration.from_pretrained(EMU3)
    folder = copy_checkpoint(EMU3, tmp_path / "transformers-5")
    model.save_pretrained(folder, save_original_format=False)
    names = load_file(folder / "model.safetensors").keys()
    assert {"model.text_model.norm.weight", "model.vqmodel.quantize.embedding.weight", "lm_head.weight"} < names
    assert_same_bundles(bundle, export_model(read_emu3(folder, grid=4), tmp_path / "emu3"))


def test_omitted_configuration_fields_have_the_usual_defaults(tmp_path: Path) -> None:
    folder = copy_checkpoint(
        EMU3, tmp_path / "model", config=lambda c: c["text_config"].update(rope_theta=1e6, rms_norm_eps=1e-5)
    )
    rope = [read_emu3(checkpoint, grid=4).graphs[0].module.rope for checkpoint in (folder, EMU3)]
    assert torch.equal(*rope)


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize("layout", ["hf", "original"])
@pytest.mark.parametrize("trace", SINGLE_IMAGE_RUNS, ids=lambda trace: trace["name"])
def test_prompts_of_recorded_runs_have_the_recorded_token_ids(
    tokenizers: dict[str, Tokenizer], layout: str, trace: dict[str, Any]
) -> None:
    tokenizer = tokenizers[layout]
    prompt_layout = make_emu3_prompt_layout(tokenizer, trace["negative"])
    size = make_emu3_image_size(tokenizer, *trace["grid"], 2)
    prompt = prompt_layout.fill(trace["text"].removesuffix(SUFFIX), size.name)
    text = TemplateTokenizer(tokenizer).encode(prompt, 2048)
    assert [*prompt_layout.before, *text.tolist(), *prompt_layout.after, *size.tokens] == trace["prompt_ids"]
    assert prompt_layout.uncond is not None
    if trace["unconditional_ids"] is not None:
        assert [*prompt_layout.uncond, *size.tokens] == trace["unconditional_ids"]
    if trace["unconditional_ids"] is not None and trace["negative"]:
        spec = ConditionSpec(kind="tokens", prefix=2048, layout=prompt_layout)
        context = RequestContext(spec, TemplateTokenizer(tokenizer), size, uses_guidance=True)
        tokens = NegativePrompt(trace["negative"]).finish(context).row.tokens
        assert tokens is not None
        assert tokens.tolist() == trace["unconditional_ids"]
    assert size.name == f"{2 * trace['grid'][1]}x{2 * trace['grid'][0]}"


@pytest.mark.parametrize("layout", ["hf", "original"])
@pytest.mark.parametrize("case", PROTOCOL["tokenizer_cases"], ids=lambda case: case["text"][:20])
def test_tokenizers_of_both_layouts_give_the_recorded_token_ids(
    tokenizers: dict[str, Tokenizer], layout: str, case: dict[str, Any]
) -> None:
    ids = TemplateTokenizer(tokenizers[layout]).encode(case["text"], 2048).tolist()
    assert ids == case[f"ids_{layout}"]


def merge_pairs(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Encode a piece of text as tiktoken does: merge the neighbours of the lowest rank until none is left."""
    if piece in ranks:
        return [ranks[piece]]
    tokens = [piece[i : i + 1] for i in range(len(piece))]
    while candidates := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(tokens)) if a + b in ranks]:
        _, i = min(candidates)
        tokens[i : i + 2] = [tokens[i] + tokens[i + 1]]
    return [ranks[token] for token in tokens]


@pytest.fixture(scope="module")
def tokenizer_and_ranks() -> tuple[Tokenizer, dict[bytes, int]]:
    lines = (EMU3_ORIGINAL / "emu3.tiktoken").read_text().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}
    return Tokenizer.from_buffer(convert_tiktoken(EMU3_ORIGINAL / "emu3.tiktoken", r"[a-z ]+|\S", ())), ranks


@given(text=st.text("aeilnorst dgu", min_size=1, max_size=40))
def test_a_converted_tiktoken_file_encodes_text_as_tiktoken_does(
    tokenizer_and_ranks: tuple[Tokenizer, dict[bytes, int]], text: str
) -> None:
    tokenizer, ranks = tokenizer_and_ranks
    assert tokenizer.encode(text).ids == merge_pairs(text.encode(), ranks)
