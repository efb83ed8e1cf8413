"""Published models by name: their requirements, and their bundles in a cache on this machine.

`published.json` has one entry per model. The first use of a model downloads its finished bundle from the Hugging Face
Hub. If the model has no finished bundle, its checkpoints are downloaded and exported. The cache is the folder
`LANTERN_RT_CACHE`, by default `~/.cache/lantern-rt`. For each model and precision it has a folder with an exported
bundle, or a link to a finished bundle in the hub's cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, TypeAdapter

from .bundle.files import open_bundle
from .bundle.hub import parse_hub_reference
from .engines.host import EXPORT_BYTES, check_free_memory, import_onnxruntime
from .engines.ort.providers import detect_provider
from .errors import BundleError, CheckpointError, OutputError, RequestError
from .inputs import convert_read_errors, require_library
from .methods import FrozenModel
from .output.files import check_disk_space, check_new_folder, convert_output_errors

if TYPE_CHECKING:
    from .engines.contracts import Progress

TABLE = Path(__file__).with_name("published.json")
_MANIFEST = "bundle.json"
_OTHER_CACHE = "set LANTERN_RT_CACHE to another folder"  # remedy in errors


class PublishedBundle(FrozenModel):
    """Finished bundle of a published model on the hub.

    With a finished bundle, `lantern-rt run` needs no PyTorch, and downloads less than with checkpoints.

    Attributes:
        reference: reference to the bundle on the hub, `hf:owner/name@commit`.
        digest: SHA-256 hash of `bundle.json`, in hexadecimal.
        download_bytes: size of the bundle's files in bytes.
    """

    reference: str
    digest: str
    download_bytes: int

    # `check_host_requirements` reads these fields from both classes. A finished bundle needs no export.
    login: ClassVar = False
    export_libraries: ClassVar[tuple[str, ...]] = ()
    export_bytes: ClassVar = 0
    bundle_bytes: ClassVar = 0  # the cache of bundles has only a link

    @property
    def repositories(self) -> list[str]:
        """Hub repository of the bundle, as a list."""
        return [parse_hub_reference(self.reference, BundleError)[0]]


class PublishedModel(FrozenModel):
    """Published model, with the hub references of its checkpoints and the options to export them.

    Attributes:
        family: model family, a value of `lantern-rt export --family`.
        files: hub references of the checkpoints, by the option of `export` that takes each checkpoint.
        options: other options of `export` with their values.
        cfg_scale: guidance scale for which the model was trained; None: the scale of the family.
        sizes: image sizes in pixels, as text.
        parameters: number of parameters of the target model.
        download_bytes: size of the checkpoints in bytes.
        memory_bytes: estimated memory to generate one image with int8 weights, in bytes.
        licence: licence of the weights, as the publisher names it.
        login: whether the hub requires a login for the checkpoints.
        makes_images: whether the bundle has an image decoder. A bundle without an image decoder generates tokens for
            another program.
        bundles: finished bundles by precision, which `deploy/publish.py` adds.
    """

    family: str
    files: dict[str, str]
    options: dict[str, int | str]
    cfg_scale: float | None = None
    sizes: str
    parameters: int
    download_bytes: int
    memory_bytes: int
    licence: str
    login: bool = False
    makes_images: bool = True
    bundles: dict[str, PublishedBundle] = Field(default_factory=dict)

    export_libraries: ClassVar = ("torch", "onnx", "onnxruntime")
    export_bytes: ClassVar = EXPORT_BYTES

    @property
    def bundle_bytes(self) -> int:
        """Maximum size of an exported bundle, in bytes."""
        return self.download_bytes  # a bundle has the same weights in the same or a smaller type

    @property
    def export_options(self) -> dict[str, Any]:
        """All options of `export` with their values, including the checkpoints."""
        return {**self.files, **self.options}

    @property
    def subject(self) -> str:
        """Name of the request parameter that the model needs: `prompts` or `class_ids`."""
        return "class_ids" if self.family == "llamagen" and "text_encoder" not in self.files else "prompts"

    @property
    def repositories(self) -> list[str]:
        """Hub repositories of the checkpoints, without duplicates."""
        return [*dict.fromkeys(parse_hub_reference(text, CheckpointError)[0] for text in self.files.values())]


@cache
def load_published_models() -> dict[str, PublishedModel]:
    """Return the published models by name."""
    return TypeAdapter(dict[str, PublishedModel]).validate_json(TABLE.read_bytes())


def find_published_model(name: str) -> PublishedModel:
    """Return a published model by name.

    Raises:
        RequestError: there is no published model of this name.
    """
    models = load_published_models()
    if name not in models:
        remedy = "`lantern-rt models` lists the names"
        raise RequestError(field="model", found=repr(name), expected="the name of a published model", remedy=remedy)
    return models[name]


def find_models_cache_folder() -> Path:
    """Return the folder in which exported and downloaded bundles are cached.

    Raises:
        OutputError: the user has no home folder, and no environment variable names another folder.
    """
    if chosen := os.environ.get("LANTERN_RT_CACHE"):
        return Path(chosen)
    base = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))  # still `~` without a home folder
    if not base.is_absolute():
        raise OutputError(field=str(base), found="no home folder for bundles", remedy=_OTHER_CACHE)
    return base / "lantern-rt"


def choose_default_precision() -> str:
    """Return the precision of the bundles for this host: `fp16` with an NVIDIA GPU, else `int8`."""
    return "fp16" if detect_provider(import_onnxruntime()) == "cuda" else "int8"


def list_cached_bundles(name: str) -> list[Path]:
    """Return the folders of a published model's cached bundles, in all precisions.

    Raises:
        OutputError: the cache cannot be read.
    """
    with _open_cache_folder() as folder:
        return sorted(path.parent for path in folder.glob(f"{name}@*/{_MANIFEST}"))


def find_cached_bundle(name: str) -> Path | None:
    """Return the folder of a published model's cached bundle, in the precision for this host; None: not in the cache.

    Raises:
        OutputError: the cache cannot be read.
    """
    with _open_cache_folder():
        folder = _cached_bundle_folder(name)
        return folder if (folder / _MANIFEST).is_file() else None


def _cached_bundle_folder(name: str) -> Path:
    """Return the folder for a published model's bundle in the precision for this host, even if it does not exist."""
    return find_models_cache_folder() / f"{name}@{choose_default_precision()}"


@contextmanager
def _open_cache_folder() -> Iterator[Path]:
    """Yield the folder of cached bundles, and convert errors in the `with` block to OutputError."""
    folder = find_models_cache_folder()
    with convert_read_errors(folder, "a folder of bundles", OutputError, _OTHER_CACHE):
        with suppress(FileNotFoundError):
            # Raises an error if the folder cannot be read. Since Python 3.13, methods such as `glob` ignore this error.
            folder.stat()
        yield folder


def is_published(name: str) -> bool:
    """Return whether a name means a published model, because no folder has the same name."""
    return name in load_published_models() and not Path(name).is_dir()


def is_missing_from_cache(name: str) -> bool:
    """Return whether a name means a published model whose bundle is not in the cache."""
    return is_published(name) and find_cached_bundle(name) is None


def find_bundle_source(name: str, force_export: bool = False) -> PublishedModel | PublishedBundle:
    """Find the source of a published model's bundle for this host: a finished bundle, or checkpoints to export.

    Args:
        name: name of the published model.
        force_export: whether to ignore a finished bundle.

    Returns:
        The finished bundle or, without a finished bundle, the model with its checkpoints.
    """
    model = find_published_model(name)
    finished = model.bundles.get(choose_default_precision()) if model.bundles and not force_export else None
    return finished or model


def check_host_requirements(name: str, force_export: bool = False) -> None:
    """Check that this host can download, export and run a published model.

    Args:
        name: name of the published model.
        force_export: whether to export the model even if there is a finished bundle.

    Raises:
        EngineError: an export is needed, and a library for exports is not installed.
        RequestError: there is too little memory.
        OutputError: a cache cannot be read or written, or there is too little disk space.
        CheckpointError: the hub requires a login, and there is none.
    """
    model = find_published_model(name)
    source = find_bundle_source(name, force_export)
    for library in source.export_libraries:
        require_library(library, "export", "cpu,export")
    from huggingface_hub import constants, get_token

    # `memory_bytes` is for int8; fp16 weights have twice as many bytes.
    needed = max(source.export_bytes, model.memory_bytes * (2 if choose_default_precision() == "fp16" else 1))
    check_free_memory(needed, "use a smaller model")
    try:
        folder = _cached_bundle_folder(name)
        # `check_new_folder` rejects links. A link to a finished bundle may be replaced, so another path is checked.
        check_new_folder(folder.parent / "new" if os.path.islink(folder) else folder, True, _MANIFEST)
    except OutputError as error:
        error.remedy = _OTHER_CACHE
        raise
    hub = Path(constants.HF_HUB_CACHE)
    remedy = "set HF_HOME and LANTERN_RT_CACHE to folders on a larger disk"
    with convert_read_errors(hub, "a folder of checkpoints", OutputError, remedy):
        downloaded = sum(_count_downloaded_bytes(hub, repository) for repository in source.repositories)
        check_disk_space(
            [(hub, source.download_bytes - downloaded), (find_models_cache_folder(), source.bundle_bytes)], remedy
        )
    if source.login and get_token() is None:
        pages = " and ".join(f"https://huggingface.co/{repository}" for repository in source.repositories)
        remedy = f"accept the terms at {pages}, then run `hf auth login`"
        raise CheckpointError("the hub asks for a login", field=name, remedy=remedy)


def _count_downloaded_bytes(hub_cache: Path, repository: str) -> int:
    """Return how many bytes of a repository are in the hub's cache already."""
    blobs = hub_cache / f"models--{repository.replace('/', '--')}" / "blobs"
    return sum(file.stat().st_size for file in blobs.glob("*") if file.suffix != ".incomplete")


def export_published_model(name: str, progress: Progress | None = None) -> Path:
    """Export a published model to the cache of bundles. Checkpoints that are not in the hub's cache are downloaded.

    Args:
        name: name of the published model.
        progress: progress callback; None: no progress is reported.

    Returns:
        The folder of the bundle. The folder appears only once the bundle is complete.

    Raises:
        LanternError: the host does not meet a requirement of `check_host_requirements`, the hub cannot be reached, or
            the export fails.
    """
    from .export.progress import ignore_progress

    check_host_requirements(name, force_export=True)
    folder = _cached_bundle_folder(name)
    with _lock_output_folder(folder, progress or ignore_progress):
        if os.path.islink(folder) and find_cached_bundle(name) is None:  # a link to a finished bundle that was deleted
            with convert_output_errors(folder):
                folder.unlink()
        if find_cached_bundle(name) is None:  # otherwise another program exported the bundle while it held the lock
            export_bundle(name, folder, choose_default_precision(), progress)
    return folder


def export_bundle(name: str, output: Path, precision: str, progress: Progress | None = None) -> Path:
    """Export a published model to a folder, and replace a bundle in this folder.

    Args:
        name: name of the published model, which becomes the name of the bundle.
        output: output path of the bundle.
        precision: `int8`, or `fp16` for GPUs.
        progress: progress callback; None: no progress is reported.

    Returns:
        The output path. The folder appears only once the bundle is complete.

    Raises:
        LanternError: the hub cannot be reached, or the export fails.
    """
    from .export.graph.precision import parse_precisions
    from .export.progress import ignore_progress
    from .export.registry import read_family_checkpoints
    from .export.writer import export_model

    report = progress or ignore_progress
    model = find_published_model(name)
    choice = {"target": "int8"} if precision == "int8" else {"compute": "float16", "vq": "fp16"}
    loaded = read_family_checkpoints(model.family, model.export_options, report, model.cfg_scale)
    loaded = replace(loaded, licence=model.licence)
    return export_model(loaded, output, name=name, precisions=parse_precisions(**choice), force=True, progress=report)


@contextmanager
def _lock_output_folder(output: Path, report: Progress) -> Iterator[None]:
    """Wait until no other program exports the same bundle, and lock the bundle for the `with` block.

    Args:
        output: folder of the bundle.
        report: progress callback, called before a wait.
    """
    from filelock import FileLock, Timeout

    output.parent.mkdir(parents=True, exist_ok=True)
    # The lock file lies beside the folder, because an export replaces the folder.
    lock = FileLock(output.with_name(f".{output.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"waiting for another program that exports {output.name}", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def fetch_published_model(name: str, progress: Progress | None = None, force_export: bool = False) -> Path:
    """Download the finished bundle of a published model or, if there is none, export the model.

    Args:
        name: name of the published model.
        progress: progress callback of an export; None: no progress is reported.
        force_export: whether to export the model even if there is a finished bundle.

    Returns:
        The folder of the bundle in the cache.

    Raises:
        BundleError: the finished bundle cannot be downloaded, or its hash differs from `published.json`.
        LanternError: the host does not meet a requirement, or an export fails, as for `export_published_model`.
    """
    source = find_bundle_source(name, force_export)
    if isinstance(source, PublishedModel):
        return export_published_model(name, progress)
    check_host_requirements(name)
    try:
        bundle = open_bundle(source.reference, digest=source.digest)
    except BundleError as error:
        instead = f"`lantern-rt run {name} --export` exports it from its checkpoint"
        error.remedy = "; ".join(filter(None, [error.remedy, instead]))
        raise
    folder = _cached_bundle_folder(name)
    with convert_output_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A new link replaces an old link in one step, so other programs never find a missing bundle.
        link = folder.with_name(f".{folder.name}.{os.getpid()}")
        link.symlink_to(bundle.folder)
        link.replace(folder)
    return folder


def resolve_bundle_name(name: str, download: bool = False) -> str | Path:
    """Return the cached bundle's folder for the name of a published model; return any other name unchanged.

    Args:
        name: name of a published model, or name or path of any bundle.
        download: whether to download a model that is not in the cache. A model without a finished bundle is exported.

    Raises:
        BundleError: the model is not in the cache.
        LanternError: the download or the export fails, as for `fetch_published_model`.
    """
    if not is_published(name):
        return name
    cached = find_cached_bundle(name)
    if cached is None and not download:
        remedy = f"`lantern-rt run {name}` downloads it; in Python, download=True"
        raise BundleError("a published model that is not in the cache", field=f"bundle {name!r}", remedy=remedy)
    return cached or fetch_published_model(name)
