"""The `doctor` command: what this host offers, and what is wrong with it."""

from __future__ import annotations

import importlib.metadata
from contextlib import suppress
from dataclasses import asdict

import typer

from .. import __version__
from ..bundle.files import embedded_names
from ..engines.gpu import gpu_report
from ..engines.host import host_report
from ..output.tables import text_table
from .console import print_json, print_text
from .options import Json

EXAMPLES = """
lantern-rt doctor
lantern-rt doctor --json
"""
_PACKAGES = ("numpy", "pillow", "pydantic", "tokenizers", "rich", "typer", "torch", "onnx")


def doctor(json: Json = False) -> None:
    """Print versions, backends, cores, memory, GPUs, what will be used, and what is wrong (exit code 2 if so)."""
    report, gpu = host_report(), gpu_report()
    packages = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    bundles = embedded_names()
    if json:
        print_json(
            {"lantern_rt": __version__, "packages": packages, "bundles": bundles, **asdict(report), "gpu": asdict(gpu)}
        )
    else:
        installed = ", ".join(f"{name} {version}" for name, version in packages.items())
        rows = [("lantern-rt", __version__), *report.rows(), *gpu.rows(), ("packages", installed)]
        print_text(text_table([*rows, ("bundles", ", ".join(bundles) or "none embedded")]))
    if report.problems or gpu.problems:
        raise typer.Exit(2)
