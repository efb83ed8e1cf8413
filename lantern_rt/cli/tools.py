"""The commands around generating: `inspect`, `doctor`, `export`.

Does not know option parsing, nor how a checkpoint becomes a bundle.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import time
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .. import __version__
from ..errors import CheckpointError, EngineError
from .families import FAMILIES, Checkpoints, read_family
from .memory import PeakMemory
from .verify import export_progress

if TYPE_CHECKING:
    from ..bundle.files import Fact

_PACKAGES = ("numpy", "pillow", "pydantic", "rich", "typer", "torch", "onnx")


def inspect_command(name: str, as_json: bool) -> None:
    """Print what a bundle, or an engine folder, says about itself."""
    from ..bundle.files import as_dict, describe, embedded_names, open_bundle
    from ..engines.engine_folder import is_engine_folder

    if name not in embedded_names() and is_engine_folder(name):
        from .build_engine import inspect_engines_command

        inspect_engines_command(name, as_json)
        return

    bundle = open_bundle(name)
    if as_json:
        print(json.dumps(as_dict(bundle)))
        return
    print_facts(describe(bundle))


def doctor_command(as_json: bool) -> None:
    """Print what this host offers; exit code 2 if something needs a cure."""
    from ..bundle.files import embedded_names
    from ..engines.host import host_report

    report = host_report()
    packages = {name: version for name in _PACKAGES if (version := _version(name))}
    if as_json:
        found = {"lantern_rt": __version__, "packages": packages, "bundles": embedded_names(), **report.as_dict()}
        print(json.dumps(found))
    else:
        _print_rows(
            [
                ("lantern-rt", __version__),
                *report.rows(),
                ("packages", ", ".join(f"{name} {version}" for name, version in packages.items())),
                ("bundles", ", ".join(embedded_names()) or "none embedded"),
            ]
        )
    if report.problems:
        raise typer.Exit(2)


def export_command(
    family: str,
    given: Checkpoints,
    output: Path,
    name: str | None,
    force: bool,
    precision: str | None = None,
    drafter_precision: str | None = None,
    compute: str = "float32",
) -> None:
    """Write a bundle from checkpoints, and say what it took."""
    if family not in FAMILIES:
        raise CheckpointError(f"family: found {family!r}, expected {' or '.join(FAMILIES)}")
    if missing := [name for name in ("torch", "onnx", "onnxruntime") if importlib.util.find_spec(name) is None]:
        raise EngineError(
            f"export needs {' and '.join(missing)}, found none installed; run `pip install 'lantern-rt[cpu,export]'`"
        )
    given.check(family)
    from ..export.graph.precision import read_precisions
    from ..export.writer import check_output, export_model

    precisions = read_precisions(precision, drafter_precision, compute)
    check_output(output, force)  # before anything is fetched
    fetched, origins = given.fetched(family)
    start = time.perf_counter()
    with PeakMemory() as peak, export_progress() as progress:
        progress("reading checkpoints")
        model = read_family(family, fetched)
        export_model(model, output, name=name, precisions=precisions, origins=origins, force=force, progress=progress)
    size = sum(file.stat().st_size for file in output.iterdir())
    memory = "" if peak.bytes is None else f", at most {peak.bytes / 1e9:.2f} GB of memory besides mapped files"
    print(f"wrote {size / 1e9:.2f} GB in {time.perf_counter() - start:.0f} s{memory}", file=sys.stderr)
    print(output)


def print_facts(facts: Iterable[Fact]) -> None:
    """Print facts, section by section."""
    for section, group in groupby(facts, key=lambda fact: fact.section):
        print(section)
        _print_rows((fact.key, fact.value) for fact in group)


def _print_rows(rows: Iterable[tuple[str, str]]) -> None:
    pairs = list(rows)
    width = max(len(key) for key, _ in pairs)
    for key, value in pairs:
        print(f"  {key:{width}}  {value}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
