"""Test host that uses published models by name; a local HTTP server serves small models under these names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint_copies import (
    ANOLE,
    ANOLE_DRAFTER,
    C2I,
    COSMOS,
    DRAFTER,
    EMU35,
    EMU35_VQ,
    GEAR,
    GEAR_FILES,
    GLM_IMAGE,
    JANUS,
    LUMINA,
    LUMINA2,
    MASKGIT_VQ,
    MOVQGAN,
    PROLOGUE,
    PROLOGUE_CONFIG,
    PROLOGUE_VQ,
    RAR,
    SIMPLEAR,
    T2I,
    VQ,
    VQGAN,
    config_path,
    copy_checkpoint,
    copy_published_emu3,
)
from random_drafter import save_random_drafter
from small_models import save_t5
from stand_in_hub import REPOSITORIES, environment, run

from lantern_rt import published
from lantern_rt.bundle.hub import parse_hub_reference
from lantern_rt.errors import CheckpointError
from lantern_rt.published import PublishedModel

NAME = "llamagen-c2i-b-256"
ExportSources = tuple[dict[str, Path], dict[str, int]]  # checkpoints by role, and other options of `export`
# Runs the command line. The first arguments are modules that cannot be imported, and another table of models.
PROGRAM = """
import json, sys
from pathlib import Path
sys.modules |= dict.fromkeys(json.loads(sys.argv.pop(1)))
from lantern_rt import published
published.TABLE = Path(sys.argv.pop(1))
from lantern_rt.cli.main import main
main(sys.argv[1:])
"""


def list_text_to_image_llamagen_sources(folder: Path) -> ExportSources:
    save_t5(folder / "t5")
    files = {"target": T2I, "config": config_path(T2I), "vq": VQ, "drafter": DRAFTER, "text_encoder": folder / "t5"}
    return files, {}


def list_lumina_sources(folder: Path) -> ExportSources:
    save_random_drafter(folder / "drafter")
    return {"target": LUMINA, "vq": VQGAN / "vqgan.ckpt", "drafter": folder / "drafter"}, {"grid": 6}


def list_emu3_sources(folder: Path) -> ExportSources:
    target, vq = copy_published_emu3(folder)
    return {"target": target, "vq": vq}, {"grid": 4}


def list_emu35_sources(folder: Path) -> ExportSources:
    copy_checkpoint(EMU35, folder / "emu35", config=lambda config: config.pop("max_position_embeddings"))
    return {"target": folder / "emu35", "vq": EMU35_VQ}, {}


PROLOGUE_FILE = PROLOGUE / "model.safetensors"
# By family: function that returns small checkpoints, and writes missing files to its folder.
SMALL_CHECKPOINTS: dict[str, Callable[[Path], ExportSources]] = {
    "llamagen": lambda _: ({"target": C2I, "vq": VQ, "config": config_path(C2I)}, {}),
    "rar": lambda _: ({"target": RAR, "vq": MASKGIT_VQ}, {}),
    "text": list_text_to_image_llamagen_sources,
    "gear": lambda _: ({"target": GEAR, **GEAR_FILES}, {}),
    "anole": lambda _: ({"target": ANOLE, "vq": VQGAN / "vqgan.ckpt", "drafter": ANOLE_DRAFTER}, {"grid": 8}),
    "lumina": list_lumina_sources,
    "lumina2": lambda _: ({"target": LUMINA2, "vq": MOVQGAN / "movqgan_270M.ckpt"}, {"grid": 8}),
    "glm_image": lambda _: ({"target": GLM_IMAGE}, {"grid": 2}),
    "janus": lambda _: ({"target": JANUS}, {}),
    "emu3": list_emu3_sources,
    "emu35": list_emu35_sources,
    "simplear": lambda _: ({"target": SIMPLEAR, "vq": COSMOS}, {"grid": 5}),
    "prologue": lambda _: ({"target": PROLOGUE_FILE, "vq": PROLOGUE_VQ, "config": PROLOGUE_CONFIG}, {}),
}


class EmptyCacheHost:
    """Machine with empty caches, whose hub serves a small model under a published name."""

    def __init__(self, hub: str, folder: Path, name: str = NAME, revision: str = "", **fields: Any) -> None:
        self.hub = hub
        self.name = name
        self.missing_modules: list[str] = []  # names of modules that the host's programs cannot import
        self.folder = folder
        self.cache = folder / "bundles"
        model = published.load_published_models()[name]
        sources, options = SMALL_CHECKPOINTS["text" if name.startswith("llamagen-t2i") else model.family](folder)
        files = dict(model.files)
        if "config" in sources:
            files["config"] = f"hf:{model.repositories[0]}/config.json"
        for role, reference in files.items():
            repository, file, _ = parse_hub_reference(reference, CheckpointError)
            contents = REPOSITORIES.setdefault(repository, {})
            source = sources[role]
            if file is None:
                paths = [path for path in source.rglob("*") if path.is_file() and path.suffix != ".npz"]
                contents |= {path.relative_to(source).as_posix(): path.read_bytes() for path in paths}
            elif source.is_dir():
                contents |= {f"{file}/{path.name}": path.read_bytes() for path in source.iterdir()}
            else:
                contents[file] = source.read_bytes()
        files = {role: f"{reference.partition('@')[0]}{revision}" for role, reference in files.items()}
        fields = {"files": files, "options": options, "download_bytes": 1_000_000, "memory_bytes": 1} | fields
        published_model = PublishedModel.model_validate(model.model_dump() | fields)
        (folder / "models.json").write_text(json.dumps({name: published_model.model_dump()}))

    @property
    def bundles(self) -> list[str]:
        """File names of the bundles in the cache."""
        return [path.name for path in self.cache.glob("*")]

    def make_command(self, *arguments: object) -> list[str]:
        return ["-c", PROGRAM, json.dumps(self.missing_modules), str(self.folder / "models.json"), *map(str, arguments)]

    def __call__(self, *arguments: object, hub: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run `lantern-rt` with `arguments` to the end; `hub` is the address of another hub."""
        variables = {"LANTERN_RT_CACHE": str(self.cache)}
        return run(hub or self.hub, self.folder / "home", *self.make_command(*arguments), **variables)

    def start(self, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        variables = environment(self.hub, self.folder / "home", LANTERN_RT_CACHE=str(self.cache))
        command = [sys.executable, *self.make_command(*arguments)]
        return subprocess.Popen(command, env=variables, text=True, start_new_session=True, **options)

    def kill_when(self, condition: Callable[[], object]) -> None:
        """Start to generate an image, and kill the program as soon as the condition holds."""
        program = self.start("run", self.name, "--class-id", 3, "--yes", stderr=subprocess.DEVNULL, cwd=self.folder)
        end = time.monotonic() + 60
        try:
            while not condition():
                assert time.monotonic() < end
                time.sleep(0.02)
        finally:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()

    def generate(self, name: str, hub: str | None = None) -> Path:
        image = self.folder / name
        process = self("run", self.name, "--class-id", 3, "--seed", 0, "--yes", "--output", image, hub=hub)
        assert process.returncode == 0, process.stderr
        return image
