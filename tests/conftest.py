"""Fixtures for all tests: bundles exported from the small checkpoints in `tests/data`, and ways to run the program."""

from __future__ import annotations

import hashlib
import inspect
import json
import multiprocessing
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from drawn_weights import write_checkpoints

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
BUNDLE_CACHE = ROOT / "build" / "test-bundles"  # ignored by git
EXPORT_SOURCES = (  # files and folders that determine the content of the exported bundles
    "export",
    "engines/graph_writer.py",
    "lantern_rt/bundle",
    "lantern_rt/bundles/scenes/bundle.json",
    "lantern_rt/methods.py",
    "recipes",
    "tests/conftest.py",
    "tests/data",
)


NOT_QUICK = (  # modules of `tests/unit` that `pytest -m quick` leaves out
    "test_exactness.py",
    "test_examples.py",
    "test_extending_family.py",
    "test_growth.py",
    "test_how_the_program_ends.py",
    "test_types.py",
)


write_checkpoints()  # before test modules are imported: some read a checkpoint


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import the modules of other folders than `tests/unit` for quick tests."""
    is_other_folder = collection_path.parent == ROOT / "tests" and collection_path.name != "unit"
    return True if config.getoption("-m") == "quick" and is_other_folder else None


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the quick tests."""
    for item in items:
        is_unit_test = item.path.parent == ROOT / "tests" / "unit" and item.path.name not in NOT_QUICK
        if is_unit_test and not item.get_closest_marker("slow"):
            item.add_marker("quick")


@pytest.fixture(scope="session", autouse=True)
def _use_empty_measurement_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use an empty cache folder of lantern-rt in all tests, so that no measurement of an earlier run is read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANTERN_RT_CACHE", str(tmp_path_factory.mktemp("measurements")))
        yield


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs `lantern-rt` in an empty folder and returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    from lantern_rt.cli.main import run_program

    def run(*arguments: object) -> tuple[int, str, str]:
        code = run_program([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def interrupt() -> Iterator[Callable[..., Any]]:
    """Return a function that sends SIGTERM to this process; the handler of the signal raises TimeoutError."""

    def raise_timeout(*_: object) -> None:
        raise TimeoutError("too slow")

    previous_handler = signal.signal(signal.SIGTERM, raise_timeout)
    yield lambda *_, **__: signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, previous_handler)


@pytest.fixture
def call_in_new_process() -> Callable[..., Any]:
    """Return a function that calls a function in a new process, whose memory has no freed blocks yet."""

    def call(function: Callable[..., Any], *arguments: object) -> Any:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            return process.submit(function, *arguments).result()

    return call


@pytest.fixture(params=[False, True], ids=["float32", "bfloat16"])
def bfloat16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether the test trains in bfloat16: each test runs twice, on any processor, with float32 and bfloat16."""
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(f"torch.cpu.{name}", lambda: request.param)
    return bool(request.param)


# ---------------------------------------------------------------- exporting once


@cache
def _prepare_cache_folder() -> Path:
    """Return the cache folder for the bundles of the current export sources; remove the folders of older sources."""
    digest = hashlib.sha256()
    for name in EXPORT_SOURCES:
        source = ROOT / name
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if path.is_file() and path.suffix != ".pyc":
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    folder = BUNDLE_CACHE / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    for old_folder in BUNDLE_CACHE.iterdir():
        if old_folder != folder:
            shutil.rmtree(old_folder, ignore_errors=True)
    return folder


@contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    """Wait for the lock on a file and hold it, so that parallel test processes export a bundle only once."""
    try:
        import fcntl
    except ImportError:  # Windows has no fcntl: run the tests with one worker there
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _export_once(
    factory: pytest.TempPathFactory, name: str, export: Callable[[Path], Path], libraries: tuple[str, ...] = ()
) -> Path:
    """Export a bundle unless it is in the cache, and return a copy that tests may change.

    Args:
        name: folder in the cache and name of the bundle, as in `c2i_bundle/tiny-c2i`.
        libraries: modules that this export imports besides torch, onnx, onnxruntime and safetensors.
    """
    for library in ("torch", "onnx", "onnxruntime", "safetensors", *libraries):
        pytest.importorskip(library)
    import torch

    torch.set_num_threads(1)
    name, bundle = name.split("/")
    code = Path(inspect.getfile(getattr(export, "func", export))).read_bytes()
    folder = _prepare_cache_folder() / f"{name}-{hashlib.sha256(code).hexdigest()[:8]}"
    with _hold_lock(folder.with_suffix(".lock")):
        if not (folder / bundle).is_dir():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            export(folder / bundle)
    return shutil.copytree(folder / bundle, factory.mktemp("bundles") / bundle)


@pytest.fixture(scope="session")
def export_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return `_export_once` for exports that only one test module needs."""
    return partial(_export_once, tmp_path_factory)


# ---------------------------------------------------------------- LlamaGen


def _make_llamagen_fixture(
    fixture: str,
    description: str,
    target: str,
    drafter: bool = False,
    compute: str = "float32",
    precision: str | None = None,
) -> Callable[[pytest.TempPathFactory], Path]:
    """Create a session fixture that exports a LlamaGen bundle.

    Args:
        precision: precision of stored weights, such as `int8`; None for the default of `compute`.
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
        return _export_once(tmp_path_factory, f"{fixture}/{name}", export)

    bundle.__doc__ = description
    return pytest.fixture(scope="session", name=fixture)(bundle)


T2I = "llamagen-t2i/t2i_tiny.pt"
c2i = _make_llamagen_fixture(
    "c2i_bundle",
    "Export class-conditional LlamaGen without a drafter: 10 classes, 4 x 4 codes.",
    "llamagen-c2i/c2i_tiny.pt",
)
t2i = _make_llamagen_fixture(
    "t2i_bundle", "Export text-conditional LlamaGen without a drafter: prefix 8, 6 x 6 codes.", T2I
)
t2i_drafter = _make_llamagen_fixture(
    "t2i_drafter_bundle", "Export text-conditional LlamaGen with an EAGLE drafter.", T2I, True
)
t2i_half = _make_llamagen_fixture(
    "t2i_half_bundle", "Export text-conditional LlamaGen with a drafter, in float16.", T2I, True, "float16"
)
t2i_bfloat16 = _make_llamagen_fixture(
    "t2i_bfloat16_bundle", "Export text-conditional LlamaGen with a drafter, in bfloat16.", T2I, True, "bfloat16"
)
t2i_int8 = _make_llamagen_fixture(
    "t2i_int8_bundle",
    "Export text-conditional LlamaGen with a drafter; weights are stored as int8.",
    T2I,
    True,
    precision="int8-weights",
)
t2i_products = _make_llamagen_fixture(
    "t2i_products_bundle",
    "Export text-conditional LlamaGen with a drafter and int8 matmuls.",
    T2I,
    True,
    precision="int8",
)
lantern_c2i = _make_llamagen_fixture(
    "lantern_c2i_bundle",
    "Export class-conditional LlamaGen from a checkpoint in LANTERN's layout.",
    "lantern-llamagen-hf/c2i",
)
lantern_t2i = _make_llamagen_fixture(
    "lantern_t2i_bundle",
    "Export text-conditional LlamaGen from a checkpoint in LANTERN's layout.",
    "lantern-llamagen-hf/t2i",
)
lantern_fullprefix = _make_llamagen_fixture(
    "lantern_fullprefix_bundle",
    "Export a checkpoint in LANTERN's layout with a drafter and the published prefix (120) and grid (16 x 16).",
    "lantern-e2e-llamagen-fullprefix/target",
    True,
)


# ---------------------------------------------------------------- other families


@pytest.fixture(scope="session")
def float_scenes_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the embedded `scenes` model with float32 matmuls, so that GPUs and CPUs generate the same images."""

    def export(output: Path) -> Path:
        from recipes.scenes.bundle import write_scenes_bundle
        from recipes.scenes.restore import restore_work_folder

        work = output.parent / "work"
        restore_work_folder("scenes", work)
        return write_scenes_bundle(work, output, force=False, progress=lambda *_: None)

    return _export_once(tmp_path_factory, "float_scenes_bundle/scenes", export)


@pytest.fixture(scope="session")
def anole_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export Anole with a VQGAN image decoder and an EAGLE drafter: 8 x 8 codes; prompts are token ids."""
    folder = DATA / "anole"
    files = {"target": folder / "target", "vq": DATA / "chameleon-vqgan", "drafter": folder / "drafter"}
    return _export_family(tmp_path_factory, "anole", files, ("tokenizers", "yaml"))


@pytest.fixture(scope="session")
def lumina_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export Lumina-mGPT with Chameleon's VQGAN and a random drafter.

    The bundle has a grid of 6 x 6 codes, other grids of similar area, and a small grid of 4 x 4 codes.
    """

    def export(output: Path) -> Path:
        from family_readers import read_lumina
        from random_drafter import save_random_drafter

        from lantern_rt.export.families.common_lumina import make_lumina_image_size
        from lantern_rt.export.writer import export_model

        target = DATA / "lumina-mgpt/model"
        drafter = tmp_path_factory.mktemp("drafter") / "drafter"
        save_random_drafter(drafter)
        model = read_lumina(target, DATA / "chameleon-vqgan", drafter=drafter, grid=6)
        vocabulary = json.loads((target / "config.json").read_text())["vocabulary_map"]
        sizes = (*model.manifest_fields["sizes"], make_lumina_image_size(2, 2, vocabulary, 2))
        return export_model(replace(model, manifest_fields={**model.manifest_fields, "sizes": sizes}), output)

    return _export_once(tmp_path_factory, "lumina_bundle/tiny-lumina", export, ("tokenizers", "yaml"))


@pytest.fixture(scope="session")
def lumina2_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export Lumina-mGPT 2.0 with a MoVQGAN image decoder, for 8 x 8 codes and other grids of similar area."""
    folder = DATA / "lumina-mgpt-2"
    options = {"target": folder / "model", "vq": folder / "movqgan/270M", "grid": 8}
    return _export_family(tmp_path_factory, "lumina2", options, ("tokenizers",))


@pytest.fixture(scope="session")
def glm_image_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export GLM-Image's autoregressive model, without an image decoder, for the image sizes of the recorded runs."""

    def export(output: Path) -> Path:
        from family_readers import read_glm_image

        from lantern_rt.export.families import glm_image
        from lantern_rt.export.writer import export_model

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                glm_image, "list_image_grids", lambda square: [(2, 2), (3, 5), (5, 2), (2, 3), (4, 3), (3, 2)]
            )
            return export_model(read_glm_image(DATA / "glm-image", grid=2), output)

    return _export_once(tmp_path_factory, "glm_image_bundle/tiny-glm-image", export, ("tokenizers",))


@pytest.fixture(scope="session")
def janus_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export Janus from DeepSeek's layout: 4 x 4 codes."""
    return _export_family(tmp_path_factory, "janus", {"target": DATA / "janus-deepseek/deepseek"}, ("tokenizers",))


@pytest.fixture(scope="session")
def emu3_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export Emu3-Gen without a drafter, with the image sizes and the negative prompt of the recorded runs."""

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

    return _export_once(tmp_path_factory, "emu3_bundle/tiny-emu3", export, ("tokenizers",))


@pytest.fixture(scope="session")
def emu35_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export Emu3.5-Image, for the image sizes of the recorded runs."""

    def export(output: Path) -> Path:
        from family_readers import read_emu35

        from lantern_rt.export.families import emu35
        from lantern_rt.export.writer import export_model

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(emu35, "SIZES", ((4, 5), (5, 3), (2, 12), (10, 11)))
            return export_model(read_emu35(DATA / "emu3.5/model", DATA / "emu3.5/vq"), output)

    return _export_once(tmp_path_factory, "emu35_bundle/tiny-emu35", export, ("tokenizers",))


@pytest.fixture(scope="session")
def simplear_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export SimpleAR without a drafter, for the image sizes of the recorded runs."""

    def export(output: Path) -> Path:
        from family_readers import read_simplear

        from lantern_rt.bundle.manifest import Size
        from lantern_rt.export.writer import export_model

        model = read_simplear(DATA / "simplear/model", DATA / "simplear/cosmos", grid=5)
        grids = ((4, 4), (5, 5), (3, 6))
        sizes = [Size(name=f"{16 * columns}x{16 * rows}", rows=rows, columns=columns) for rows, columns in grids]
        return export_model(replace(model, manifest_fields={**model.manifest_fields, "sizes": sizes}), output)

    return _export_once(tmp_path_factory, "simplear_bundle/tiny-simplear", export, ("tokenizers",))


@pytest.fixture(scope="session")
def prologue_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export Prologue: 10 classes, 4 codes of a prologue, 4 x 4 codes."""
    folder = DATA / "prologue"
    options = {"target": folder / "ar", "vq": folder / "tokenizer", "config": folder / "config.json"}
    return _export_family(tmp_path_factory, "prologue", options)


@pytest.fixture(scope="session")
def gear_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export GEAR-T2I with its text encoder: 17 text tokens, 4 x 4 codes."""
    folder = DATA / "gear-t2i"
    files = {"target": folder / "gear-t2i-gpic-1b.pt", "vq": folder / "gear-vq.pt"}
    files |= {"text_encoder": folder / "text_encoder", "config": folder / "config.json"}
    return _export_family(tmp_path_factory, "gear", files, ("tokenizers",))


@pytest.fixture(scope="session")
def rar_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export RAR with MaskGIT's image tokenizer: 10 classes, 4 x 4 codes."""
    folder = DATA / "rar"
    files = {"target": folder / "rar_tiny.bin", "vq": folder / "maskgit-vqgan-imagenet-f16-256.bin"}
    return _export_family(tmp_path_factory, "rar", files)


@pytest.fixture(scope="session")
def nar_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export class-conditional NAR: 10 classes, 8 x 8 codes."""
    return _export_grouped_family(tmp_path_factory, "nar", DATA / "nar/c2i/nar_c2i.pt")


@pytest.fixture(scope="session")
def par_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export class-conditional PAR, which generates four cells per forward pass: 10 classes, 8 x 8 codes."""
    return _export_grouped_family(tmp_path_factory, "par", DATA / "par/4x/par_4x.pt")


def _export_grouped_family(tmp_path_factory: pytest.TempPathFactory, family: str, target: Path) -> Path:
    """Export a model that generates several cells per forward pass, with LlamaGen's image decoder."""
    files = {"target": target, "vq": DATA / "llamagen-vq/vq_tiny.pt", "config": target.with_name("config.json")}
    return _export_family(tmp_path_factory, family, files)


def _export_family(
    tmp_path_factory: pytest.TempPathFactory, family: str, options: dict[str, Any], libraries: tuple[str, ...] = ()
) -> Path:
    """Export a model family, or return a copy of an earlier export."""

    def export(output: Path) -> Path:
        from lantern_rt.export.registry import read_family_checkpoints
        from lantern_rt.export.writer import export_model

        return export_model(read_family_checkpoints(family, options), output)

    return _export_once(tmp_path_factory, f"{family}_bundle/tiny-{family}", export, libraries)
