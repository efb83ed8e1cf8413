"""The `doctor` command: what this host offers, and what is wrong with it."""

from __future__ import annotations

import importlib.metadata
from contextlib import suppress
from dataclasses import asdict

import typer

from .. import __version__
from ..bundle.files import embedded_names, open_bundle
from ..engines.gpu import gpu_report
from ..engines.host import host_report
from ..errors import LanternError
from ..output.tables import text_table
from ..planning.store import PictureChoice, read_tuning
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
    tuned = {name: choice for name in bundles if (choice := _tuned_decoder(name)) is not None}
    if json:
        facts = {"lantern_rt": __version__, "packages": packages, "bundles": bundles, **asdict(report)}
        decoders = {name: choice.model_dump() for name, choice in tuned.items()}
        print_json({**facts, "image_decoders": decoders, "gpu": asdict(gpu)})
    else:
        installed = ", ".join(f"{name} {version}" for name, version in packages.items())
        found = [("image decoder", f"{name}: {choice}, tuned on {choice.date}") for name, choice in tuned.items()]
        rows = [("lantern-rt", __version__), *report.rows(), *found, *gpu.rows(), ("packages", installed)]
        print_text(text_table([*rows, ("bundles", ", ".join(bundles) or "none embedded")]))
    if report.problems or gpu.problems:
        raise typer.Exit(2)


def _tuned_decoder(name: str) -> PictureChoice | None:
    """What `tune` found for an embedded bundle's image decoder; None if nothing, or the bundle is damaged."""
    with suppress(LanternError):
        return read_tuning(open_bundle(name, verify=False).digest).picture
    return None
