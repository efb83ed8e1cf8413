"""Bundles exported once per test session from the small checkpoints in `tests/data`; no test reads what this user's
host was tuned to, or changes it."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session", autouse=True)
def _own_measurements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANTERN_RT_CACHE", str(tmp_path_factory.mktemp("measurements")))
        yield


@pytest.fixture
def even_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that nothing disturbs: every look at a clock finds it 0.05 ms later."""
    ticks = itertools.count()
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: 5e-5 * next(ticks))


@pytest.fixture(scope="session")
def c2i_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class-conditional LlamaGen without a drafter: 10 classes, 4 x 4 codes."""
    return _export(tmp_path_factory, "llamagen-c2i/c2i_tiny.pt", None)


@pytest.fixture(scope="session")
def t2i_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text-conditional LlamaGen without a drafter: prefix 8, 6 x 6 codes."""
    return _export(tmp_path_factory, "llamagen-t2i/t2i_tiny.pt", None)


@pytest.fixture(scope="session")
def t2i_drafter_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with its EAGLE drafter."""
    return _export(tmp_path_factory, "llamagen-t2i/t2i_tiny.pt", "lantern-drafter-llamagen")


@pytest.fixture(scope="session")
def lantern_c2i_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class-conditional LlamaGen from a folder in LANTERN's layout."""
    return _export(tmp_path_factory, "lantern-llamagen-hf/c2i", None)


@pytest.fixture(scope="session")
def lantern_t2i_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text-conditional LlamaGen from a folder in LANTERN's layout."""
    return _export(tmp_path_factory, "lantern-llamagen-hf/t2i", None)


@pytest.fixture(scope="session")
def lantern_fullprefix_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LANTERN's layout with the published prefix (120) and grid (16 x 16), and a drafter."""
    return _export(tmp_path_factory, "lantern-e2e-llamagen-fullprefix/target", "lantern-drafter-llamagen")


@pytest.fixture(scope="session")
def t2i_half_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text-conditional LlamaGen with its EAGLE drafter, computing in float16."""
    return _export(tmp_path_factory, "llamagen-t2i/t2i_tiny.pt", "lantern-drafter-llamagen", "float16")


@pytest.fixture(scope="session")
def t2i_int8_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text-conditional LlamaGen with its EAGLE drafter, weights stored as int8."""
    return _export(tmp_path_factory, "llamagen-t2i/t2i_tiny.pt", "lantern-drafter-llamagen", precision="int8-weights")


@pytest.fixture(scope="session")
def t2i_products_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text-conditional LlamaGen with its EAGLE drafter, multiplying int8."""
    return _export(tmp_path_factory, "llamagen-t2i/t2i_tiny.pt", "lantern-drafter-llamagen", precision="int8")


def _export(
    factory: pytest.TempPathFactory,
    target: str,
    drafter: str | None,
    compute: str = "float32",
    precision: str | None = None,
) -> Path:
    for needed in ("torch", "onnx", "onnxruntime", "safetensors"):
        pytest.importorskip(needed)
    import torch

    from lantern_rt.export.families.llamagen import read_llamagen
    from lantern_rt.export.graph.precision import read_precisions
    from lantern_rt.export.writer import export_model

    torch.set_num_threads(1)
    name = "tiny-t2i-drafter" if drafter else "tiny-t2i" if "t2i" in target else "tiny-c2i"
    official = (DATA / target).is_file()
    model = read_llamagen(
        DATA / target,
        DATA / "llamagen-vq/vq_tiny.pt",
        drafter=None if drafter is None else DATA / drafter,
        config=(DATA / target).with_name("config.json") if official else None,
    )
    precisions = read_precisions(precision, compute=compute)
    return export_model(model, factory.mktemp("bundles") / name, precisions=precisions)


@pytest.fixture(scope="session")
def anole_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chameleon with its VQGAN and EAGLE drafter: 8 x 8 codes, prompts of tokens; the tokenizer knows ids by name."""
    for needed in ("torch", "onnx", "onnxruntime", "safetensors", "tokenizers", "yaml"):
        pytest.importorskip(needed)
    import torch

    from lantern_rt.export.families.anole import read_anole
    from lantern_rt.export.writer import export_model

    torch.set_num_threads(1)
    output = tmp_path_factory.mktemp("bundles") / "tiny-anole"
    model = read_anole(DATA / "anole/target", DATA / "chameleon-vqgan", drafter=DATA / "anole/drafter")
    return export_model(model, output)


@pytest.fixture(scope="session")
def lumina_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lumina-mGPT with Chameleon's VQGAN and a random drafter: 6 x 6 codes and sizes of about as many, and 4 x 4."""
    for needed in ("torch", "onnx", "onnxruntime", "safetensors", "tokenizers", "yaml"):
        pytest.importorskip(needed)
    import torch

    from lantern_rt.export.families.lumina import lumina_size, read_lumina
    from lantern_rt.export.writer import export_model

    torch.set_num_threads(1)
    target, folder = DATA / "lumina-mgpt/model", tmp_path_factory.mktemp("bundles")
    _random_drafter(folder / "drafter")
    model = read_lumina(target, DATA / "chameleon-vqgan", drafter=folder / "drafter", grid=6)
    names = json.loads((target / "config.json").read_text())["vocabulary_map"]
    sizes = (*model.fields["sizes"], lumina_size(2, 2, names))
    return export_model(replace(model, fields={**model.fields, "sizes": sizes}), folder / "tiny-lumina")


def _random_drafter(folder: Path) -> None:
    """A drafter for the small Lumina-mGPT in LANTERN's layout, its norms of queries and keys as the target's."""
    import torch
    from safetensors.torch import save_file

    wide, tall = (112, 64), (64, 112)
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (518, 64), "fc.weight": (64, 128), "fc.bias": (64,)}
    layer = {f"self_attn.{part}_proj.weight": (64, 64) for part in "qkvo"}
    layer |= {f"self_attn.{part}_norm.{kind}": (1, 16) for part in "qk" for kind in ("weight", "bias")}
    layer |= {"mlp.gate_proj.weight": wide, "mlp.up_proj.weight": wide, "mlp.down_proj.weight": tall}
    shapes |= {f"layers.0.{name}": shape for name, shape in layer.items()}
    shapes |= {f"layers.0.{name}_layernorm.weight": (64,) for name in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(0)
    folder.mkdir()
    weights = {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    sizes = {"hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = {"model_type": "chameleon", "vocab_size": 518, "rms_norm_eps": 1e-5, **sizes}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def emu3_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Emu3-Gen without a drafter: 4 x 4 codes, and the sizes and the negative text that runs were recorded with."""
    for needed in ("torch", "onnx", "onnxruntime", "safetensors", "tokenizers"):
        pytest.importorskip(needed)
    import torch
    from tokenizers import Tokenizer

    from lantern_rt.export.families.emu3 import picture_size, prompt_layout, read_emu3
    from lantern_rt.export.writer import export_model

    torch.set_num_threads(1)
    target = DATA / "emu3/model"
    model, library = read_emu3(target, grid=4), Tokenizer.from_file(str(target / "tokenizer.json"))
    sizes = [picture_size(library, rows, columns, 2) for rows, columns in ((4, 4), (4, 5), (5, 3), (2, 12))]
    layout = prompt_layout(library, "low quality, blurry.")
    condition = model.fields["condition"].model_copy(update={"layout": layout})
    output = tmp_path_factory.mktemp("bundles") / "tiny-emu3"
    return export_model(replace(model, fields={**model.fields, "sizes": sizes, "condition": condition}), output)
