"""Published models by name: their requirements, and their bundles in the caches of this machine.

`published.json` has one entry per model. The first use of a model downloads its finished bundle to the hub's cache. If
there is none, its checkpoints are downloaded and exported to the folder `NAME@PRECISION` of `find_cache_folder`.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

from pydantic import Field, TypeAdapter

from .bundle.files import MANIFEST_FILE, Bundle, open_bundle
from .bundle.hub import find_hub_cache, find_snapshot_folder, parse_hub_reference
from .engines.host import EXPORT_BYTES, check_space, import_onnxruntime
from .engines.ort.providers import detect_provider
from .errors import BundleError, CheckpointError, OutputError, RequestError
from .hints import suggest_name
from .inputs import check_int, convert_read_errors, format_value, require_library
from .methods import FrozenModel
from .output.files import (
    check_new_folder,
    convert_output_errors,
    find_cache_folder,
    lock_folder,
)
from .requests import check_options
from .subjects.table import choose_subject_kind

if TYPE_CHECKING:
    from .engines.contracts import Progress

TABLE = Path(__file__).with_name("published.json")
_OTHER_CACHE = "set LANTERN_RT_CACHE to another folder"  # remedy in errors


class _HubSource(FrozenModel, ABC):
    needs_export: ClassVar[bool]

    @property
    @abstractmethod
    def references(self) -> list[str]:
        """Hub references of the files."""

    @property
    def repositories(self) -> list[str]:
        return [*dict.fromkeys(parse_hub_reference(text, CheckpointError)[0] for text in self.references)]


class PublishedBundle(_HubSource):
    """Finished bundle on the hub, which needs no PyTorch. `digest` is the sha256 of its `bundle.json`."""

    needs_export: ClassVar[bool] = False
    reference: str = Field(pattern="@[0-9a-f]{40}$")
    digest: str
    download_bytes: int

    @property
    def references(self) -> list[str]:
        return [self.reference]


class PublishedModel(_HubSource):
    """Model whose checkpoints are on the hub.

    Attributes:
        files: hub references of the checkpoints, by the option of `export` that takes each.
        options: other options of `export` with their values.
        cfg_scale: guidance scale for which the model was trained; None: that of the family.
        classes: number of classes; None: the model takes prompts.
        memory_bytes: estimated memory to generate one image with int8 weights.
        login: whether the hub requires a login for the checkpoints.
        makes_images: False: the bundle generates tokens for another program.
        bundles: finished bundles by precision, which `deploy/publish.py` adds.
    """

    needs_export: ClassVar[bool] = True
    family: str
    files: dict[str, str]
    options: dict[str, int | str]
    cfg_scale: float | None = None
    sizes: str
    classes: int | None = None
    parameters: int
    download_bytes: int
    memory_bytes: int
    licence: str
    login: bool = False
    makes_images: bool = True
    bundles: dict[str, PublishedBundle] = Field(default_factory=dict)

    @property
    def target_repository(self) -> str:
        return parse_hub_reference(self.files["target"], CheckpointError)[0]

    @property
    def export_options(self) -> dict[str, Any]:
        return {**self.files, **self.options}

    @property
    def references(self) -> list[str]:
        return [*dict.fromkeys(self.files.values())]


@cache
def load_published_models() -> dict[str, PublishedModel]:
    return TypeAdapter(dict[str, PublishedModel]).validate_json(TABLE.read_bytes())


def find_published_model(name: str) -> PublishedModel:
    models = load_published_models()
    if name not in models:
        remedy = suggest_name(name, models) or "`lantern-rt models` lists the names"
        raise RequestError(field="model", found=repr(name), expected="the name of a published model", remedy=remedy)
    return models[name]


def check_published_request(name: str, options: Mapping[str, Any]) -> int:
    """Check a request before the published model is downloaded, with the facts in the table of models.

    Args:
        options: `prompts` and the options of `Options`.

    Returns:
        The number of images.
    """
    model = find_published_model(name)
    kind = choose_subject_kind(options, "class" if model.classes else "text", name)
    size = options.get("size")
    others = "," in model.sizes  # the table does not list all sizes
    if size is not None and not re.fullmatch(r"[1-9]\d{0,3}x[1-9]\d{0,3}" if others else model.sizes, size, re.ASCII):
        raise RequestError(field="size", found=format_value(size), expected=model.sizes)
    items = kind.name_items(options[kind.words.parameter])
    if model.classes:
        for item_name, class_id in items:
            check_int(item_name, class_id, 0, 0, model.classes - 1)
    num_images, method = check_options(len(items), options)
    problem = ""
    if method and method.requirements.order:
        problem = f"{name} generates one token after another"
    elif method and method.requirements.drafters and "drafter" not in model.files:
        problem = f"{name} has no drafter"
    if method and problem:
        raise RequestError(problem, field=f"method {method.method}", remedy="use another method, such as sjd")
    return num_images


def choose_default_precision() -> str:
    """Return the precision of the bundles for this host: `fp16` with an NVIDIA GPU, else `int8`."""
    return "fp16" if detect_provider(import_onnxruntime()) == "cuda" else "int8"


def find_cached_bundle(name: str, precision: str | None = None) -> str | Path | None:
    """Return the folder of an exported bundle or the hub reference of a finished one; None: not in the caches.

    The bundle's files are complete, but their hashes are not checked. If the table pins a finished bundle, no other is
    returned, so that a release replaces the bundle of an earlier one. A precision of None is that for this host.
    """
    precision = precision or choose_default_precision()
    finished = find_published_model(name).bundles.get(precision)
    digest = finished.digest if finished else None
    with _open_cache_folder() as cache:
        exported = cache / f"{name}@{precision}"
        if _is_complete(exported, digest):
            return exported
        if finished and _is_complete(find_snapshot_folder(finished.reference), digest):
            return finished.reference
    return None


def _is_complete(folder: Path, digest: str | None) -> bool:
    with suppress(BundleError):
        open_bundle(folder, verify=False, digest=digest)
        return True
    return False


def find_unusable_bundle(name: str) -> Path | None:
    """Return the folder of a cached bundle that `find_cached_bundle` does not return; None: there is none."""
    source = find_bundle_source(name)
    places = [_exported_bundle_folder(name)]
    if not source.needs_export:
        places += find_snapshot_folder(source.references[0]).parent.glob("*")
    return next((folder for folder in places if os.path.isfile(folder / MANIFEST_FILE)), None)


def _exported_bundle_folder(name: str) -> Path:
    return find_cache_folder() / f"{name}@{choose_default_precision()}"


@contextmanager
def _open_cache_folder() -> Iterator[Path]:
    folder = find_cache_folder()
    with convert_read_errors(folder, "a folder of bundles", OutputError, _OTHER_CACHE):
        with suppress(FileNotFoundError):
            folder.stat()  # raises an error if the folder cannot be read
        yield folder


def is_published(name: object) -> TypeGuard[str]:
    """Return whether a name means a published model; a folder of this name comes first."""
    return isinstance(name, str) and name in load_published_models() and not Path(name).is_dir()


def is_missing_from_cache(name: str) -> bool:
    return is_published(name) and find_cached_bundle(name) is None


def find_bundle_source(name: str) -> PublishedModel | PublishedBundle:
    """Return the finished bundle of a published model for this host or, if there is none, the model."""
    model = find_published_model(name)
    return (model.bundles.get(choose_default_precision()) if model.bundles else None) or model


def check_host_requirements(name: str, source: PublishedModel | PublishedBundle) -> None:
    """Check that this host can download and run a published model or, for the `source` of a model, export it.

    Raises:
        EngineError: an export needs a library that is not installed.
        RequestError: there is too little memory.
        OutputError: a cache cannot be read or written, or a disk is too full.
        CheckpointError: the hub requires a login, and there is none.
    """
    # `memory_bytes` is for int8; fp16 weights have twice as many bytes.
    model = find_published_model(name)
    memory = model.memory_bytes * (2 if choose_default_precision() == "fp16" else 1)
    exported: list[tuple[Path, int]] = []
    if source.needs_export:
        for library in ("torch", "onnx", "onnxruntime"):
            require_library(library, "export", "cpu,export")
        memory = max(memory, EXPORT_BYTES)
        # A bundle has the same weights as the checkpoints, in the same or a smaller type.
        exported = [(_check_export_folder(name), source.download_bytes)]
        _check_login(name, model)
    hub = find_hub_cache()
    with convert_read_errors(hub, "a folder of downloads", OutputError, "set HF_HOME to another folder"):
        missing = source.download_bytes - sum(map(_count_downloaded_bytes, source.references))
        check_space(memory, [(hub, missing), *exported])


def _check_export_folder(name: str) -> Path:
    folder = _exported_bundle_folder(name)
    try:
        check_new_folder(folder, True, MANIFEST_FILE)
    except OutputError as error:
        error.remedy = f"delete it, or {_OTHER_CACHE}" if os.path.lexists(folder) else _OTHER_CACHE
        raise
    return folder


def _check_login(name: str, model: PublishedModel) -> None:
    from huggingface_hub import get_token

    if model.login and get_token() is None:
        pages = " and ".join(f"https://huggingface.co/{repository}" for repository in model.repositories)
        remedy = f"accept the terms at {pages}, then run `hf auth login`"
        raise CheckpointError("the hub asks for a login", field=name, remedy=remedy)


def _count_downloaded_bytes(reference: str) -> int:
    folder = find_snapshot_folder(reference)
    _, file, _ = parse_hub_reference(reference, CheckpointError)
    paths = folder.rglob("*") if file is None else [folder / file]
    return sum(path.stat().st_size for path in paths if path.is_file())


def export_bundle(name: str, output: Path, precision: str, progress: Progress | None = None) -> Path:
    """Export a published model, which gives its name to the bundle. `precision` is `int8`, or `fp16` for GPUs."""
    from .export.graph.precision import parse_precisions
    from .export.progress import ignore_progress
    from .export.prompts import add_prompts
    from .export.registry import read_family_checkpoints
    from .export.writer import export_model

    report = progress or ignore_progress
    model = find_published_model(name)
    choice = {"target": "int8"} if precision == "int8" else {"compute": "float16", "vq": "fp16"}
    loaded = read_family_checkpoints(model.family, model.export_options, report, model.cfg_scale)
    loaded = add_prompts(replace(loaded, licence=model.licence))
    return export_model(loaded, output, name=name, precisions=parse_precisions(**choice), force=True, progress=report)


def fetch_published_model(name: str, progress: Progress | None = None) -> str | Path:
    """Download the finished bundle of a published model or, if there is none, its checkpoints, and export them.

    Returns the hub reference of the finished bundle, or the folder of the exported one.
    """
    source = find_bundle_source(name)
    check_host_requirements(name, source)
    if isinstance(source, PublishedBundle):
        try:
            open_bundle(source.reference, digest=source.digest)
        except BundleError as error:
            instead = f"`lantern-rt export {name} --output FOLDER` exports it from its checkpoint"
            error.remedy = "; ".join(filter(None, [error.remedy, instead]))
            raise
        return source.reference
    folder = _exported_bundle_folder(name)

    def report_wait() -> None:
        if progress is not None:
            progress(f"waiting for another program that exports a model to {folder.parent}", 0, 0)

    with convert_output_errors(folder, (OSError,)):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder.parent.resolve(), report_wait):
        if find_cached_bundle(name) is None:  # otherwise another program exported the bundle while it held the lock
            export_bundle(name, folder, choose_default_precision(), progress)
    return folder


def open_published_model(name: str, download: bool, **options: Any) -> Bundle:
    """Open the bundle of a published model, perhaps after a download; `options` are those of `open_bundle`."""
    place = find_cached_bundle(name)
    if place is None and download:
        place = fetch_published_model(name)
    if place is None:
        old = find_unusable_bundle(name)
        problem = "not in the cache" if old is None else f"{old} is incomplete, damaged or of another release"
        remedy = f"`lantern-rt run {name}` downloads it; in Python, download=True"
        raise BundleError(problem, field=f"published model {name}", remedy=remedy)
    try:
        return open_bundle(place, **options)
    except BundleError as error:
        if isinstance(place, Path):
            error.remedy = f"delete {place}; `lantern-rt run {name}` then exports it again"
        raise
