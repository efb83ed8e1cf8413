"""Who may import whom: generating needs neither torch nor onnx, the runtime knows no backend."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_bundle import make_tiny_bundle

import lantern_rt

HEAVY = {"torch", "onnx", "onnxscript", "safetensors"}


def folder_of(name: str) -> Path:
    """The source folder of a subpackage, wherever it is installed from."""
    for root in lantern_rt.__path__:
        if (Path(root) / name / "__init__.py").is_file():
            return Path(root) / name
    raise AssertionError(f"no folder {name}")


def imported(file: Path, only_at_import: bool = False) -> Iterator[str]:
    """Dotted names that a file imports, relative ones with their leading dots."""
    tree = ast.parse(file.read_text("utf-8"))
    for node in tree.body if only_at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def run_python(code: str) -> set[str]:
    """Modules loaded after `code` in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")[-2].split())


def test_the_runtime_imports_no_backend_and_no_neighbour_but_the_errors() -> None:
    for file in folder_of("runtime").glob("*.py"):
        for name in imported(file):
            assert name.partition(".")[0] not in HEAVY | {"onnxruntime", "tensorrt", "PIL", "typer", "rich", "pydantic"}
            assert not name.startswith("lantern_rt"), f"{file.name}: use relative imports"
            assert not name.startswith("..") or name == "..errors", f"{file.name} imports {name}"


@pytest.mark.parametrize("name", ["engines", "api"])
def test_engines_and_the_public_side_import_neither_torch_nor_onnx(name: str) -> None:
    folder = Path(lantern_rt.__file__).parent if name == "api" else folder_of(name)
    for file in folder.glob("*.py"):
        assert HEAVY.isdisjoint(module.partition(".")[0] for module in imported(file)), file.name
        top = set(imported(file, only_at_import=True))
        assert not {module for module in top if module.lstrip(".").startswith(("export", "train"))}, file.name


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = run_python("import lantern_rt")
    assert loaded.isdisjoint(HEAVY | {"onnxruntime", "numpy", "PIL", "pydantic", "typer", "rich"})


def test_generating_imports_neither_torch_nor_onnx(tmp_path: Path) -> None:
    folder = make_tiny_bundle(tmp_path / "tiny")
    loaded = run_python(
        "from lantern_rt import Pipeline\n"
        f"pipe = Pipeline.from_bundle({str(folder)!r}, threads=1)\n"
        "for method in ('ar', 'eagle', 'lantern', 'lantern++'): pipe('red cube', method=method).images[0]"
    )
    assert "onnxruntime" in loaded
    assert loaded.isdisjoint(HEAVY | {"typer", "rich"})
