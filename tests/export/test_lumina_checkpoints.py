"""Lumina-mGPT's files that do not fit are named, and its sizes are the published ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llamagen_golden import DATA
from refusals import refused
from safetensors.torch import load_file, save_file

from lantern_rt.cli.main import run_program
from lantern_rt.errors import CheckpointError
from lantern_rt.export.families.anole import read_anole
from lantern_rt.export.families.lumina import lumina_size, patch_sizes, read_lumina
from lantern_rt.export.models.decoder import Attention

TARGET, VQ = DATA / "lumina-mgpt/model", DATA / "chameleon-vqgan"
PROTOCOL: dict[str, Any] = json.loads((DATA / "lumina-mgpt/protocol.json").read_text())


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A copy of the target that may be damaged."""
    folder = tmp_path / "target"
    shutil.copytree(TARGET, folder)
    return folder


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / "config.json").read_text())
    edit(content)
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("pixels", [512, 768, 1024])
def test_sizes_are_the_published_ones_of_each_model(pixels: int) -> None:
    names = {f"<reserved{8800 + n:05d}>": 8804 + n for n in range(65)} | {"<racm3:break>": 8197}
    sizes = [lumina_size(high, wide, names) for high, wide in patch_sizes(pixels // 32)]
    assert [[*map(int, size.name.split("x"))] for size in sizes] == PROTOCOL["official_sizes"][str(pixels)]
    assert all((16 * size.columns, 16 * size.rows) == (*map(int, size.name.split("x")),) for size in sizes)
    square = next(size for size in sizes if size.rows == size.columns)
    assert square.name == f"{pixels}x{pixels}"
    assert square.tokens == (8197, 8804 + pixels // 32, 8804 + pixels // 32)


def test_defaults_are_those_of_the_published_solver() -> None:
    fields = read_lumina(TARGET, VQ, grid=4).fields
    sampling = fields["sampling"]
    assert (sampling.cfg_scale, sampling.top_k) == (PROTOCOL["cfg"], 2000)  # the solver's for images, and LANTERN's
    assert (sampling.temperature, sampling.top_p) == (1.0, 1.0)


def test_a_drafter_is_read_as_anoles_and_a_row_of_its_norms_serves_every_head(
    lumina_bundle: Path, tmp_path: Path
) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(lumina_bundle.parent / "drafter", drafter)
    ours = read_lumina(TARGET, VQ, drafter=drafter, grid=4)
    weights = load_file(drafter / "model.safetensors")
    norms = {name: weight.repeat(4, 1) for name, weight in weights.items() if "_norm." in name}
    assert len(norms) == 4
    save_file(weights | norms, drafter / "model.safetensors")
    repeated = read_lumina(TARGET, VQ, drafter=drafter, grid=4)
    anole = read_anole(DATA / "anole/target", VQ, drafter=DATA / "anole/drafter")
    graphs = [next(graph for graph in one.graphs if graph.role == "drafter") for one in (ours, repeated, anole)]
    found, expected, other = (graph.module.state_dict() for graph in graphs)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert found.keys() == expected.keys() == other.keys()
    chosen = {"position_shift", "masks_prefix", "prefix_token", "code_offset"}
    assert ours.fields["drafter"].model_dump(include=chosen) == anole.fields["drafter"].model_dump(include=chosen)


def test_a_row_of_norms_serves_as_many_heads_as_the_model_was_split_for(target: Path) -> None:
    """(model_parallel_size, head width): repeated row by row, which is transformers' own layout."""
    weights = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in weights if "_norm." in name and "self_attn" in name]:
        weights[name] = torch.randn(2, 16, generator=generator).bfloat16()
    save_file(weights, target / "model.safetensors")
    found = read_lumina(target, VQ, grid=4).graphs[0].module.layers[1].attention
    assert isinstance(found, Attention)
    for part, norm in (("q", found.query_norm), ("k", found.key_norm)):
        for kind in ("weight", "bias"):
            rows = weights[f"model.layers.1.self_attn.{part}_norm.{kind}"]
            assert torch.equal(getattr(norm, kind), rows[torch.tensor([0, 0, 1, 1])])


@pytest.mark.parametrize("rows", [3, 8])
def test_norms_of_a_number_of_rows_that_heads_do_not_explain_are_named(target: Path, rows: int) -> None:
    weights = load_file(target / "model.safetensors")
    weights["model.layers.0.self_attn.q_norm.bias"] = torch.ones(rows, 16)
    save_file(weights, target / "model.safetensors")
    with refused(
        CheckpointError, str(target), f"model.layers.0.self_attn.q_norm.bias has shape [{rows}, 16]", "[4, 16]"
    ):
        read_lumina(target, VQ, grid=4)


@pytest.mark.parametrize(("grid", "found"), [(None, "nothing"), (5, "5")])
def test_a_grid_must_be_given_in_whole_patches(grid: int | None, found: str) -> None:
    with refused(CheckpointError, f"--grid: found {found}, expected 32, 48 or 64 for Lumina-mGPT of 512, 768 or 1024"):
        read_lumina(TARGET, VQ, grid=grid)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c.update(architectures=["ChameleonForConditionalGeneration"]), ("found architectures", "--family")),
        (
            lambda c: c.pop("mask_image_logits") or c.pop("architectures"),
            ("found no mask_image_logits", "--family anole"),
        ),
        (lambda c: c["vocabulary_map"].pop("<reserved08799>"), ("vocabulary_map lacks <reserved08799>",)),
        (lambda c: c["vocabulary_map"].pop("<reserved08803>"), ("vocabulary_map lacks <reserved08803>",)),
        (lambda c: c["vocabulary_map"].update({"<reserved08799>": 600}), ("has 518 rows, but config.json has", "600")),
        (lambda c: c.update(max_position_embeddings=20), ("max_position_embeddings is 20, expected more than the 23",)),
    ],
)
def test_configurations_that_do_not_fit_are_named(
    target: Path, edit: Callable[..., Any], words: tuple[str, ...]
) -> None:
    change(target, edit)
    with refused(CheckpointError, str(target), *words):
        read_lumina(target, VQ, grid=4)


def test_an_end_of_row_before_the_codes_is_named(target: Path) -> None:
    change(target, lambda config: config["vocabulary_map"].update({"<reserved08799>": 3, "<unk>": 142}))
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    swapped = {"<reserved08799>": "<unk>", "<unk>": "<reserved08799>"}
    for entry in tokenizer["added_tokens"]:
        entry["content"] = swapped.get(entry["content"], entry["content"])
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {swapped.get(name, name): token for name, token in vocabulary.items()}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    with refused(CheckpointError, str(target), "<reserved08799> is token 3, expected one behind the image tokens"):
        read_lumina(target, VQ, grid=4)


def test_other_families_say_which_one_takes_the_folder() -> None:
    with refused(CheckpointError, f"{TARGET}/config.json: found mask_image_logits", "--family lumina Lumina-mGPT"):
        read_anole(TARGET, VQ)


def test_the_command_line_exports_a_bundle_and_verifies_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, vq, output = str(TARGET), ["--vq", str(VQ)], str(tmp_path / "lumina")
    assert (
        run_program(["export", "--family", "lumina", "--target", target, *vq, "--grid", "4", "--output", output]) == 0
    )
    assert run_program(["verify", output, "--against", target, *vq]) == 0
    assert "passed" in capsys.readouterr().out
