"""Emu3's checkpoint layouts, prompts, sizes and tokenizers."""

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
from goldens import DATA
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer

from lantern_rt.bundle.conditions import ConditionSpec
from lantern_rt.export.checkpoints.deferred import compute_tensor
from lantern_rt.export.families.common import list_grid_shapes
from lantern_rt.export.families.common_emu3 import convert_tiktoken, make_emu3_image_size
from lantern_rt.export.families.emu3 import NEGATIVE, SUFFIX, make_emu3_prompt_layout
from lantern_rt.export.graph.graphs import write_graph
from lantern_rt.export.model import BundleContents
from lantern_rt.prompts import build_prompt_requests
from lantern_rt.runtime.raster import RowEndLayout
from lantern_rt.text.tokenizers import TemplateTokenizer

PROTOCOL = json.loads((DATA / "emu3/protocol.json").read_text())
TRACES = [trace for trace in json.loads((DATA / "emu3/traces.json").read_text()) if trace["name"] != "batch"]


@pytest.fixture(scope="module")
def as_published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return copy_published_emu3(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def libraries(as_published: tuple[Path, Path]) -> dict[str, Tokenizer]:
    """Return the tokenizers of both checkpoint layouts, as bundles contain them."""
    models = {"hf": read_emu3(EMU3, grid=4), "original": read_emu3(*as_published, grid=4)}
    return {name: Tokenizer.from_buffer(model.extra_files["tokenizer"][1]) for name, model in models.items()}


def describe(model: BundleContents) -> tuple[Any, ...]:
    """Return everything of a model but its files: manifest fields, arrays, and the weights of graphs."""
    weights = [(graph.role, *entry) for graph in model.graphs for entry in graph.module.state_dict().items()]
    numbers = {(role, name): compute_tensor(weight).numpy().tobytes() for role, name, weight in weights}
    return {**model.manifest_fields}, compute_tensor(model.code_embeddings).tolist(), model.codebook.tolist(), numbers


def write_graphs(model: BundleContents, folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    return {path.name: path.read_bytes() for graph in model.graphs for path in write_graph(graph, folder)}


# ---------------------------------------------------------------- layouts


def test_both_published_layouts_export_the_same_graphs_and_manifest(
    as_published: tuple[Path, Path], tmp_path: Path
) -> None:
    hf_model = read_emu3(EMU3, grid=4)
    original_model = read_emu3(*as_published, grid=4)
    assert describe(hf_model) == describe(original_model)
    assert write_graphs(hf_model, tmp_path / "ours") == write_graphs(original_model, tmp_path / "theirs")
    assert [role for role, _ in original_model.sources] == [
        "target_config",
        "target_tokenizer",
        "target_tokenizer",
        "target",
        "vq",
    ]


def test_a_checkpoint_saved_by_transformers_5_is_read_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.Emu3ForConditionalGeneration.from_pretrained(EMU3)
    folder = copy_checkpoint(EMU3, tmp_path / "five")
    model.save_pretrained(folder, save_original_format=False)
    names = load_file(folder / "model.safetensors").keys()
    assert {"model.text_model.norm.weight", "model.vqmodel.quantize.embedding.weight", "lm_head.weight"} < names
    assert describe(read_emu3(folder, grid=4)) == describe(read_emu3(EMU3, grid=4))


def test_omitted_fields_of_a_configuration_have_the_defaults_of_its_class(tmp_path: Path) -> None:
    folder = copy_checkpoint(
        EMU3, tmp_path / "model", config=lambda c: c["text_config"].update(rope_theta=1e6, rms_norm_eps=1e-5)
    )
    rope = [read_emu3(checkpoint, grid=4).graphs[0].module.rope for checkpoint in (folder, EMU3)]
    assert torch.equal(*rope)


def test_the_published_sizes_and_defaults_are_those_of_the_program() -> None:
    ratios = PROTOCOL["sizes_for_image_area_518400"]
    assert list_grid_shapes(PROTOCOL["image_area_default"], 8) == [tuple(size) for size in ratios.values()]
    sampling = read_emu3(EMU3, grid=4).manifest_fields["sampling"]
    assert (sampling.cfg_scale, sampling.top_k) == (PROTOCOL["cfg_default"], PROTOCOL["top_k_default"])
    assert (sampling.temperature, sampling.top_p) == (1.0, 1.0)
    assert [PROTOCOL[name] for name in ("negative_default", "positive_suffix")] == [NEGATIVE, SUFFIX]


@pytest.mark.parametrize("name", ["90x90", "68x120"])
def test_row_ends_of_published_sizes_are_where_the_published_code_forces_them(name: str) -> None:
    with np.load(DATA / "emu3/golden.npz") as arrays:
        forced = arrays[f"official_forced_{name}"]
    rows, columns = map(int, name.split("x"))
    assert (rows, columns) in list_grid_shapes(PROTOCOL["image_area_default"], 8)
    row_end = PROTOCOL["tokens"]["eol"]["official"]
    layout = RowEndLayout(rows * columns, columns, row_end=row_end)
    tokens = layout.insert_row_ends(np.full(layout.num_codes, -1)).tolist()
    tokens.append(row_end)  # the last row end is not sampled
    assert tokens == forced[: rows * (columns + 1)].tolist()
    assert (forced[len(tokens) :] >= 0).all()


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize("layout", ["hf", "original"])
@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace["name"])
def test_prompt_and_unconditional_ids_of_runs(
    libraries: dict[str, Tokenizer], layout: str, trace: dict[str, Any]
) -> None:
    library = libraries[layout]
    words = make_emu3_prompt_layout(library, trace["negative"])
    size = make_emu3_image_size(library, *trace["grid"], 2)
    text = TemplateTokenizer(library, words.template).encode(trace["text"].removesuffix(SUFFIX), 2048)
    assert [*words.before, *text.tolist(), *words.after, *size.tokens] == trace["prompt_ids"]
    assert words.uncond is not None
    if trace["unconditional_ids"] is not None:
        assert [*words.uncond, *size.tokens] == trace["unconditional_ids"]
    if trace["unconditional_ids"] is not None and trace["negative"]:
        spec = ConditionSpec(kind="tokens", prefix=2048, layout=words)
        (request,) = build_prompt_requests(spec, TemplateTokenizer(library), size, ["a cat"], trace["negative"])
        assert request.token_ids is not None
        assert request.token_ids[1].tolist() == trace["unconditional_ids"]
    assert size.name == f"{2 * trace['grid'][1]}x{2 * trace['grid'][0]}"


@pytest.mark.parametrize("layout", ["hf", "original"])
@pytest.mark.parametrize("case", PROTOCOL["tokenizer_cases"], ids=lambda case: case["text"][:20])
def test_tokenizer_cases_of_both_layouts(libraries: dict[str, Tokenizer], layout: str, case: dict[str, Any]) -> None:
    ids = TemplateTokenizer(libraries[layout]).encode(case["text"], 2048).tolist()
    assert ids == case[f"ids_{layout}"]


def merge_pairs(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Encode a piece as tiktoken does: join the neighbours with the lowest rank, the first of equal ones first."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while candidates := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
        _, i = min(candidates)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [ranks[part] for part in parts]


@pytest.fixture(scope="module")
def ranked() -> tuple[Tokenizer, dict[bytes, int]]:
    lines = (EMU3_ORIGINAL / "emu3.tiktoken").read_text().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}
    return Tokenizer.from_buffer(convert_tiktoken(EMU3_ORIGINAL / "emu3.tiktoken", r"[a-z ]+|\S", ())), ranks


@given(text=st.text("aeilnorst dgu", min_size=1, max_size=40))
def test_ranks_converted_to_merges_encode_as_tiktoken_does(
    ranked: tuple[Tokenizer, dict[bytes, int]], text: str
) -> None:
    library, ranks = ranked
    assert library.encode(text).ids == merge_pairs(text.encode(), ranks)
