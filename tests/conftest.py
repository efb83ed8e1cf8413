"""Bundles exported once per checkout from the small checkpoints in `tests/data`, and a separate cache folder."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from drawn_weights import write_checkpoints

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
CACHE = ROOT / "build" / "test-bundles"  # ignored by git
MADE_BY = (
    "export",
    "engines/graph_writer.py",
    "lantern_rt/bundle",
    "lantern_rt/bundles/scenes/bundle.json",
    "lantern_rt/methods.py",
    "recipes",
    "tests/conftest.py",
    "tests/data",
)


write_checkpoints()  # before test modules are imported: some read a checkpoint


@pytest.fixture(scope="session", autouse=True)
def _separate_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANTERN_RT_CACHE", str(tmp_path_factory.mktemp("measurements")))
        yield


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs `lantern-rt` in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    from lantern_rt.cli.main import run_program

    def program(*arguments: object) -> tuple[int, str, str]:
        code = run_program([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return program


@pytest.fixture
def interrupt() -> Iterator[Callable[..., Any]]:
    """Return a function that is interrupted by a signal, whose handler raises TimeoutError."""

    def stop(*_: object) -> None:
        raise TimeoutError("too slow")

    previous = signal.signal(signal.SIGTERM, stop)
    yield lambda *_, **__: signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, previous)


@pytest.fixture
def in_new_process() -> Callable[..., Any]:
    """Return a function that calls another in a new process, whose memory has no freed blocks."""

    def call(function: Callable[..., Any], *arguments: object) -> Any:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            return process.submit(function, *arguments).result()

    return call


@pytest.fixture(params=[False, True], ids=["float32", "bfloat16"])
def bfloat16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a test with training in float32 and in bfloat16, independent of the processor."""
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(f"torch.cpu.{name}", lambda: request.param)
    return bool(request.param)


# ---------------------------------------------------------------- exporting once


@cache
def _cache_folder() -> Path:
    """Return the cache folder of bundles that the current sources export; remove those of other sources."""
    digest = hashlib.sha256()
    for name in MADE_BY:
        source = ROOT / name
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if path.is_file() and path.suffix != ".pyc":
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    folder = CACHE / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    for old_folder in CACHE.iterdir():
        if old_folder != folder:
            shutil.rmtree(old_folder, ignore_errors=True)
    return folder


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock between processes, as tests may run in several."""
    try:
        import fcntl
    except ImportError:  # on Windows, run the tests with one worker
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _exported(
    factory: pytest.TempPathFactory, name: str, export: Callable[[Path], Path], needed: tuple[str, ...] = ()
) -> Path:
    """Copy the bundle that `export` writes into the cache; tests may change the copy.

    Args:
        factory: factory of temporary folders.
        name: name of the fixture, a slash, and the name of the bundle.
        export: function that writes the bundle.
        needed: libraries besides those of every export.
    """
    for library in ("torch", "onnx", "onnxruntime", "safetensors", *needed):
        pytest.importorskip(library)
    import torch

    torch.set_num_threads(1)
    fixture, bundle = name.split("/")
    folder = _cache_folder()
    with _lock(folder / f"{fixture}.lock"):
        if not (folder / fixture / bundle).is_dir():
            shutil.rmtree(folder / fixture, ignore_errors=True)
            export(folder / fixture / bundle)
    return shutil.copytree(folder / fixture / bundle, factory.mktemp("bundles") / bundle)


# ---------------------------------------------------------------- LlamaGen


def _llamagen(
    fixture: str, about: str, target: str, drafter: bool = False, compute: str = "float32", precision: str | None = None
) -> Callable[[pytest.TempPathFactory], Path]:
    """Make a session fixture that exports LlamaGen.

    Args:
        fixture: name of the fixture.
        about: docstring of the fixture.
        target: checkpoint below `tests/data`.
        drafter: whether the bundle has a drafter.
        compute: dtype of the computation.
        precision: precision of the weights.
    """

    def export(output: Path) -> Path:
        from family_readers import read_llamagen

        from lantern_rt.export.graph.precision import parse_precisions
        from lantern_rt.export.writer import export_model

        model = read_llamagen(
            DATA / target,
            DATA / "llamagen-vq/vq_tiny.pt",
            drafter=DATA / "lantern-drafter-llamagen" if drafter else None,
            config=(DATA / target).with_name("config.json") if (DATA / target).is_file() else None,
        )
        return export_model(model, output, precisions=parse_precisions(precision, compute=compute))

    def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
        name = "tiny-t2i-drafter" if drafter else "tiny-t2i" if "t2i" in target else "tiny-c2i"
        return _exported(tmp_path_factory, f"{fixture}/{name}", export)

    bundle.__doc__ = about
    return pytest.fixture(scope="session", name=fixture)(bundle)


T2I = "llamagen-t2i/t2i_tiny.pt"
c2i = _llamagen(
    "c2i_bundle", "Class-conditional LlamaGen without a drafter: 10 classes, 4 x 4 codes.", "llamagen-c2i/c2i_tiny.pt"
)
t2i = _llamagen("t2i_bundle", "Text-conditional LlamaGen without a drafter: prefix 8, 6 x 6 codes.", T2I)
t2i_drafter = _llamagen("t2i_drafter_bundle", "Text-conditional LlamaGen with its EAGLE drafter.", T2I, True)
t2i_half = _llamagen("t2i_half_bundle", "Text-conditional LlamaGen with a drafter, in float16.", T2I, True, "float16")
t2i_bfloat16 = _llamagen(
    "t2i_bfloat16_bundle", "Text-conditional LlamaGen with a drafter, in bfloat16.", T2I, True, "bfloat16"
)
t2i_int8 = _llamagen(
    "t2i_int8_bundle",
    "Text-conditional LlamaGen with a drafter, weights stored as int8.",
    T2I,
    True,
    precision="int8-weights",
)
t2i_products = _llamagen(
    "t2i_products_bundle", "Text-conditional LlamaGen with a drafter, int8 matmuls.", T2I, True, precision="int8"
)
lantern_c2i = _llamagen(
    "lantern_c2i_bundle", "Class-conditional LlamaGen in LANTERN's layout.", "lantern-llamagen-hf/c2i"
)
lantern_t2i = _llamagen(
    "lantern_t2i_bundle", "Text-conditional LlamaGen in LANTERN's layout.", "lantern-llamagen-hf/t2i"
)
lantern_fullprefix = _llamagen(
    "lantern_fullprefix_bundle",
    "LANTERN's layout with the published prefix (120) and grid (16 x 16), and a drafter.",
    "lantern-e2e-llamagen-fullprefix/target",
    True,
)


# ---------------------------------------------------------------- other families


@pytest.fixture(scope="session")
def float_scenes_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the embedded model with float32 matmuls, so that devices generate the CPU's images."""

    def export(output: Path) -> Path:
        from recipes.scenes.bundle import write_scenes_bundle
        from recipes.scenes.restore import restore_work_folder

        work = output.parent / "work"
        restore_work_folder("scenes", work)
        return write_scenes_bundle(work, output, force=False, progress=lambda *_: None)

    return _exported(tmp_path_factory, "float_scenes_bundle/scenes", export)


@pytest.fixture(scope="session")
def anole_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export Anole with its VQGAN and EAGLE drafter: 8 x 8 codes, prompts of tokens."""
    folder = DATA / "anole"
    files = {"target": folder / "target", "vq": DATA / "chameleon-vqgan", "drafter": folder / "drafter"}
    return _family_bundle(tmp_path_factory, "anole", files, ("tokenizers", "yaml"))


@pytest.fixture(scope="session")
def lumina_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export Lumina-mGPT with Chameleon's VQGAN and a random drafter: 6 x 6 codes, sizes of similar area, and 4 x 4."""

    def export(output: Path) -> Path:
        from family_readers import read_lumina
        from random_drafter import save_random_drafter

        from lantern_rt.export.families.common_lumina import make_lumina_image_size
        from lantern_rt.export.writer import export_model

        target = DATA / "lumina-mgpt/model"
        drafter = tmp_path_factory.mktemp("drafter") / "drafter"
        save_random_drafter(drafter)
        model = read_lumina(target, DATA / "chameleon-vqgan", drafter=drafter, grid=6)
        names = json.loads((target / "config.json").read_text())["vocabulary_map"]
        sizes = (*model.manifest_fields["sizes"], make_lumina_image_size(2, 2, names, 2))
        return export_model(replace(model, manifest_fields={**model.manifest_fields, "sizes": sizes}), output)

    return _exported(tmp_path_factory, "lumina_bundle/tiny-lumina", export, ("tokenizers", "yaml"))


@pytest.fixture(scope="session")
def lumina2_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export Lumina-mGPT 2.0 with MoVQGAN: 8 x 8 codes and sizes of similar area."""
    folder = DATA / "lumina-mgpt-2"
    options = {"target": folder / "model", "vq": folder / "movqgan/270M", "grid": 8}
    return _family_bundle(tmp_path_factory, "lumina2", options, ("tokenizers",))


@pytest.fixture(scope="session")
def glm_image_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export GLM-Image's autoregressive part, without an image decoder, in the sizes of the recorded runs."""

    def export(output: Path) -> Path:
        from family_readers import read_glm_image

        from lantern_rt.export.families import glm_image
        from lantern_rt.export.writer import export_model

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                glm_image, "list_image_grids", lambda square: [(2, 2), (3, 5), (5, 2), (2, 3), (4, 3), (3, 2)]
            )
            return export_model(read_glm_image(DATA / "glm-image", grid=2), output)

    return _exported(tmp_path_factory, "glm_image_bundle/tiny-glm-image", export, ("tokenizers",))


@pytest.fixture(scope="session")
def emu3_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export Emu3-Gen without a drafter: 4 x 4 codes, and the sizes and negative text of the recorded runs."""

    def export(output: Path) -> Path:
        from family_readers import read_emu3
        from tokenizers import Tokenizer

        from lantern_rt.export.families.common_emu3 import make_emu3_image_size
        from lantern_rt.export.families.emu3 import make_emu3_prompt_layout
        from lantern_rt.export.writer import export_model

        target = DATA / "emu3/model"
        model = read_emu3(target, grid=4)
        library = Tokenizer.from_file(str(target / "tokenizer.json"))
        sizes = [make_emu3_image_size(library, rows, columns, 2) for rows, columns in ((4, 4), (4, 5), (5, 3), (2, 12))]
        layout = make_emu3_prompt_layout(library, "low quality, blurry.")
        condition = model.manifest_fields["condition"].model_copy(update={"layout": layout})
        return export_model(
            replace(model, manifest_fields={**model.manifest_fields, "sizes": sizes, "condition": condition}), output
        )

    return _exported(tmp_path_factory, "emu3_bundle/tiny-emu3", export, ("tokenizers",))


@pytest.fixture(scope="session")
def simplear_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export SimpleAR without a drafter: 4 x 4 codes, and the sizes of the recorded runs."""

    def export(output: Path) -> Path:
        from family_readers import read_simplear

        from lantern_rt.bundle.manifest import Size
        from lantern_rt.export.writer import export_model

        model = read_simplear(DATA / "simplear/model", DATA / "simplear/cosmos", grid=5)
        grids = ((4, 4), (5, 5), (3, 6))
        sizes = [Size(name=f"{16 * columns}x{16 * rows}", rows=rows, columns=columns) for rows, columns in grids]
        return export_model(replace(model, manifest_fields={**model.manifest_fields, "sizes": sizes}), output)

    return _exported(tmp_path_factory, "simplear_bundle/tiny-simplear", export, ("tokenizers",))


@pytest.fixture(scope="session")
def nar_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export NAR: 10 classes, 8 x 8 codes."""
    return _order_bundle(tmp_path_factory, "nar", DATA / "nar/c2i/nar_c2i.pt")


@pytest.fixture(scope="session")
def par_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export PAR with four cells per pass: 10 classes, 8 x 8 codes."""
    return _order_bundle(tmp_path_factory, "par", DATA / "par/4x/par_4x.pt")


def _order_bundle(tmp_path_factory: pytest.TempPathFactory, family: str, target: Path) -> Path:
    files = {"target": target, "vq": DATA / "llamagen-vq/vq_tiny.pt", "config": target.with_name("config.json")}
    return _family_bundle(tmp_path_factory, family, files)


def _family_bundle(
    tmp_path_factory: pytest.TempPathFactory, family: str, options: dict[str, Any], needed: tuple[str, ...] = ()
) -> Path:
    def export(output: Path) -> Path:
        from lantern_rt.export.registry import read_family_checkpoints
        from lantern_rt.export.writer import export_model

        return export_model(read_family_checkpoints(family, options), output)

    return _exported(tmp_path_factory, f"{family}_bundle/tiny-{family}", export, needed)
