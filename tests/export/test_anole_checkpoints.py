"""Chameleon folders, VQGAN files and drafters that do not fit are named; shards and the command line work."""

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
from lantern_rt.export.families.anole import arrange_codes, read_anole, read_chameleon
from lantern_rt.export.models.eagle import read_drafter
from lantern_rt.export.models.llamagen_vq import read_vqgan

TARGET, VQ, DRAFTER = DATA / "anole/target", DATA / "chameleon-vqgan", DATA / "anole/drafter"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A copy of the target that may be damaged."""
    folder = tmp_path / "target"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copyfile(TARGET / name, folder / name)
    return folder


@pytest.fixture
def vq(tmp_path: Path) -> Path:
    folder = tmp_path / "vq"
    folder.mkdir()
    for name in ("vqgan.ckpt", "vqgan.yaml"):
        shutil.copyfile(VQ / name, folder / name)
    return folder


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def reweigh(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(path)
    edit(weights)
    save_file(weights, path)


def write_shards(folder: Path, shards: int) -> None:
    """The folder's weights in several files with an index, as transformers writes them."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(weights)}
    for file in set(where.values()):
        save_file({name: weights[name] for name in weights if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


# ---------------------------------------------------------------- what is read


def test_a_sharded_folder_gives_the_same_decoder_and_names_all_its_files(target: Path) -> None:
    whole = read_chameleon(target, 8)
    write_shards(target, 3)
    sharded = read_chameleon(target, 8)
    for name, weight in whole.decoder.state_dict().items():
        assert torch.equal(weight, sharded.decoder.state_dict()[name])
    assert torch.equal(whole.embeddings, sharded.embeddings)
    names = [path.name for role, path in sharded.sources if role in ("target", "target_index")]
    assert len(names) == 4
    assert "model.safetensors.index.json" in names


def test_the_head_keeps_only_the_image_tokens(target: Path) -> None:
    chameleon, weights = read_chameleon(target, 8), load_file(target / "model.safetensors")
    assert torch.equal(chameleon.decoder.head.weight, weights["lm_head.weight"][4:132])
    assert chameleon.codes == list(range(4, 132))
    assert torch.equal(chameleon.embeddings, weights["model.embed_tokens.weight"])
    layout = chameleon.condition.spec.layout
    assert layout is not None
    assert (layout.before, layout.after, layout.uncond) == ((0,), (140, 133), (0, 133))


def test_codes_are_told_by_their_names_whatever_the_order_of_their_tokens(target: Path) -> None:
    plain = read_chameleon(target, 8)
    drafter = read_drafter(DRAFTER, plain.decoder, 176).drafter
    moved = torch.arange(176)
    moved[4:132] = 4 + torch.randperm(128, generator=torch.Generator().manual_seed(0))  # old token -> new token

    def rename(config: dict[str, Any]) -> None:
        config["vocabulary_map"] = {name: int(moved[token]) for name, token in config["vocabulary_map"].items()}

    def move(table: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(table).index_copy_(0, moved, table)

    change(target / "config.json", rename)
    reweigh(
        target / "model.safetensors",
        lambda weights: weights.update(
            {name: move(weights[name]) for name in ("lm_head.weight", "model.embed_tokens.weight")}
        ),
    )
    other = read_chameleon(target, 8)
    assert other.codes == moved[4:132].tolist()
    assert torch.equal(other.decoder.head.weight, plain.decoder.head.weight)
    assert torch.equal(other.embeddings[other.codes], plain.embeddings[plain.codes])
    expected = drafter.embed.weight.clone()
    drafter.embed.weight = torch.nn.Parameter(move(expected), requires_grad=False)
    arrange_codes(drafter, other.codes)
    assert torch.equal(drafter.embed.weight, expected)


def test_the_size_of_pictures_comes_from_the_yaml_or_the_caller(vq: Path) -> None:
    assert read_vqgan(vq)[1] == 8
    assert read_vqgan(vq / "vqgan.ckpt")[1] == 8
    (vq / "vqgan.yaml").unlink()
    assert read_vqgan(vq)[1] is None


def test_export_and_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, picture = tmp_path / "anole", tmp_path / "picture.png"
    command = ["export", "--family", "anole", "--target", str(TARGET), "--vq", str(VQ), "--drafter", str(DRAFTER)]
    assert run_program([*command, "--grid", "4", "--output", str(bundle)]) == 2
    assert "its .yaml tells of a grid of 8, but 4 was asked for; leave --grid out" in capsys.readouterr().err
    assert run_program([*command, "--output", str(bundle)]) == 0
    assert capsys.readouterr().out == f"{bundle}\n"
    run = ["run", str(bundle), "tok145 tok146", "--method", "lantern++", "--output"]
    assert run_program([*run, str(picture), "--json"]) == 0
    (image,) = json.loads(capsys.readouterr().out)["images"]
    assert len(image["codes"]) == 64
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run_program(["run", str(bundle), "--class-id", "3"]) == 2
    assert "found class ids, expected a prompt: that is what bundle anole takes" in capsys.readouterr().err


# ---------------------------------------------------------------- what does not fit


def test_a_drafter_of_another_vocabulary_is_named() -> None:
    other = DATA / "lantern-drafter-llamagen"
    with refused(CheckpointError, f"{other}: the drafter has 128", "the target 176 of 64"):
        read_anole(TARGET, VQ, drafter=other)


def test_a_vq_of_another_codebook_is_named(vq: Path) -> None:
    content = torch.load(vq / "vqgan.ckpt", weights_only=True)
    content["state_dict"]["quantize.embedding.weight"] = torch.zeros(64, 16)
    torch.save(content, vq / "vqgan.ckpt")
    with refused(CheckpointError, f"{vq}/vqgan.yaml: n_embed is 128", "64"):
        read_anole(TARGET, vq)
    (vq / "vqgan.yaml").unlink()
    with refused(CheckpointError, f"{vq}: has 64 codes", "128", "give the VQ tokenizer"):
        read_anole(TARGET, vq, grid=8)


def test_a_vq_of_another_family_and_a_missing_size_are_named(vq: Path, tmp_path: Path) -> None:
    other = DATA / "llamagen-vq/vq_tiny.pt"
    with refused(CheckpointError, f"{other}: has no quantize.embedding.weight", "no VQGAN"):
        read_anole(TARGET, other)
    with refused(CheckpointError, f"{tmp_path}: expected a folder with vqgan.ckpt and vqgan.yaml"):
        read_anole(TARGET, tmp_path)
    (vq / "vqgan.yaml").unlink()
    with refused(CheckpointError, f"{vq}: no .yaml", "give --grid"):
        read_anole(TARGET, vq)
    (vq / "vqgan.yaml").write_text("model: [")
    with refused(CheckpointError, "vqgan.yaml: expected YAML, found"):
        read_vqgan(vq)
    (vq / "vqgan.yaml").write_text("model: {params: {embed_dim: 16}}")
    with refused(CheckpointError, f"{vq}/vqgan.yaml: has no model.params.ddconfig, expected"):
        read_vqgan(vq)


def test_a_tokenizer_that_is_missing_or_of_another_model_is_named(target: Path) -> None:
    def add_token(tokenizer: dict[str, Any]) -> None:
        tokenizer["model"]["vocab"]["far"] = 176

    def swap_tokens(tokenizer: dict[str, Any]) -> None:
        vocabulary = tokenizer["model"]["vocab"]
        del vocabulary["far"]
        vocabulary["<racm3:break>"], vocabulary["<eoss>"] = 132, 133
        tokenizer["added_tokens"] = []

    change(target / "tokenizer.json", add_token)
    with refused(
        CheckpointError, f"{target}/tokenizer.json: token 'far'", "176 tokens", "give the model's own tokenizer"
    ):
        read_anole(target, VQ)
    change(target / "tokenizer.json", swap_tokens)
    with refused(
        CheckpointError, "tokenizer.json: token '<racm3:break>'", "132", "133", "give the model's own tokenizer"
    ):
        read_anole(target, VQ)
    (target / "tokenizer.json").unlink()
    with refused(CheckpointError, f"{target}: has no tokenizer.json", "download it into that folder"):
        read_anole(target, VQ)


def test_missing_and_unexpected_weights_are_listed_under_the_files_names(target: Path) -> None:
    def damage(weights: dict[str, torch.Tensor]) -> None:
        del weights["model.layers.1.self_attn.q_norm.weight"], weights["model.norm.weight"]
        weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)

    reweigh(target / "model.safetensors", damage)
    names = (
        "model.layers.1.self_attn.q_norm.weight, model.norm.weight; unexpected: model.layers.0.self_attn.q_proj.bias"
    )
    with refused(CheckpointError, f"{target}: the weights do not fit", f"missing: {names}"):
        read_chameleon(target, 8)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model_type", "llama", ("'llama', expected 'chameleon'",)),
        (
            "architectures",
            ["ChameleonXLLMXForConditionalGeneration"],
            ("ChameleonXLLMX", "expected", "--family lumina Lumina-mGPT"),
        ),
        ("mask_image_logits", True, ("mask_image_logits, expected", "--family lumina Lumina-mGPT")),
        ("hidden_size", 32, ("hidden_size is 32", "64")),
        ("num_attention_heads", 5, ("num_attention_heads is 5, expected", "divides", "64")),
        ("swin_norm", True, ("swin_norm is True, expected False",)),
        ("rope_scaling", {"type": "linear"}, ("'linear', expected",)),
        ("max_position_embeddings", 60, ("max_position_embeddings is 60, expected more than", "64")),
        ("vocabulary_map", None, ("vocabulary_map", "expected", "the codes")),
        ("vocabulary_map", {"<s>": 0}, ("vocabulary_map lacks <racm3:break>, <reserved08706>",)),
        (
            "vocabulary_map",
            {"<s>": 0, "<reserved08706>": 9, "<racm3:break>": 8, "IMGIMGAZ": 4, "IMGIMGCZ": 5},
            ("vocabulary_map names 2 image tokens", "expected", "one block"),
        ),
    ],
)
def test_a_configuration_that_this_decoder_cannot_follow_is_named(
    target: Path, field: str, value: Any, words: tuple[str, ...]
) -> None:
    change(target / "config.json", lambda config: config.update({field: value}))
    with refused(CheckpointError, f"{target}/config.json: ", *words):
        read_chameleon(target, 8)


def test_key_heads_that_the_weights_do_not_have_are_named(target: Path) -> None:
    change(target / "config.json", lambda config: config.update(num_key_value_heads=2))
    with pytest.raises(CheckpointError, match=r"192 rows, which 4 heads of 16 .* 2 key heads.*num_key_value_heads$"):
        read_chameleon(target, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--family", "anole", "--vq", "v", "--model", "GPT-B"],
            "--model: family anole does not take it; leave it out",
        ),
        (["--family", "janus", "--vq", "v"], "--vq: family janus does not take it; leave it out"),
        (
            ["--family", "anole"],
            "--vq: found nothing, expected the VQ tokenizer that belongs to the anole target",
        ),
    ],
)
def test_options_that_a_family_does_not_take_or_needs_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(["export", "--target", "t", "--output", "o", *arguments]) == 2
    assert message in capsys.readouterr().err
