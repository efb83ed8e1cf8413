"""Imports between packages: no imports of higher packages, no import cycles, and no PyTorch for generation."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from package_files import RANKS, find_package_files

import lantern_rt
from lantern_rt.export.registry import FAMILIES

LARGE_PACKAGES = {"torch", "onnx", "onnxscript", "safetensors"}
BACKENDS = {"onnxruntime", "tensorrt", "tensorrt_rtx"}


def list_imports(file: Path, only_at_import: bool = False) -> Iterator[str]:
    """Yield the dotted names that a file imports, with leading dots if relative."""
    tree = ast.parse(file.read_text("utf-8"))
    for node in tree.body if only_at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            yield name
            yield from (f"{name}{'' if name.endswith('.') else '.'}{alias.name}" for alias in node.names)


def find_imports_of_modules() -> dict[str, set[str]]:
    known = find_package_files()
    targets: dict[str, set[str]] = {}
    for name, file in known.items():
        package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
        targets[name] = set()
        for target in list_imports(file):
            dots = len(target) - len(target.lstrip("."))
            if dots:
                full = ".".join([*package[: len(package) - dots + 1], target.lstrip(".")])
                targets[name] |= {full} & known.keys()
    return targets


def test_no_package_imports_a_package_of_a_higher_layer() -> None:
    upward_imports = [
        f"{source} -> {target}"
        for source, targets in find_imports_of_modules().items()
        for target in targets
        if RANKS[target.split(".")[0]] > RANKS[source.split(".")[0]]
    ]
    assert upward_imports == []


def test_there_is_no_import_cycle() -> None:
    graph = {name: targets - {name} for name, targets in find_imports_of_modules().items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph) > 80


def test_every_module_belongs_to_a_layer() -> None:
    folder = Path(lantern_rt.__file__).parent
    names = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    assert names - {"__init__", "__main__"} <= RANKS.keys()


def run_python(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(' '.join(sys.modules))"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(process.stdout.split("\n")[-2].split())


def find_external_packages(prefixes: tuple[str, ...], only_at_import: bool = False) -> set[str]:
    files = [file for name, file in find_package_files().items() if name.split(".")[0] in prefixes]
    names = {name for file in files for name in list_imports(file, only_at_import) if not name.startswith(".")}
    return {name.split(".")[0] for name in names}


def test_the_runtime_imports_neither_torch_nor_a_backend() -> None:
    assert (
        find_external_packages(("runtime",)) & (LARGE_PACKAGES | BACKENDS | {"PIL", "typer", "rich", "lantern_rt"})
        == set()
    )


def test_no_model_family_imports_another_family() -> None:
    families = {f"export.families.{name}" for name in FAMILIES}
    imports = {name: targets & families for name, targets in find_imports_of_modules().items() if name in families}
    assert imports == {name: set() for name in families}


def test_modules_that_generate_images_import_no_torch_or_onnx() -> None:
    public = tuple(name for name in RANKS if name not in ("export", "train"))
    assert find_external_packages(public) & LARGE_PACKAGES == set()
    for name, file in find_package_files().items():
        if name.split(".")[0] not in ("export", "train") and name != "cli.export":
            top = {target.lstrip(".").split(".")[0] for target in list_imports(file, only_at_import=True)}
            assert not top & {"export", "train"}, name


def test_importing_the_package_loads_no_large_dependency() -> None:
    loaded = run_python("import lantern_rt")
    assert loaded.isdisjoint(
        LARGE_PACKAGES | {"onnxruntime", "numpy", "PIL", "pydantic", "typer", "rich", "matplotlib", "scipy"}
    )


def test_exports_help_loads_no_large_dependency() -> None:
    assert run_python("import lantern_rt.cli.export").isdisjoint(LARGE_PACKAGES | {"onnxruntime"})


def test_generating_an_image_loads_neither_torch_nor_onnx(words_bundle: Path) -> None:
    loaded = run_python(
        "from lantern_rt import Pipeline\n"
        f"pipe = Pipeline.from_bundle({str(words_bundle)!r}, threads=1)\n"
        "for method in ('ar', 'eagle', 'lantern', 'lantern++'): pipe('red cube', method=method).images[0]"
    )
    assert "onnxruntime" in loaded
    assert loaded.isdisjoint(LARGE_PACKAGES | {"typer", "rich", "matplotlib", "scipy"})


def test_no_test_module_imports_another_test_module() -> None:
    for file in Path(__file__).parents[1].rglob("*.py"):
        assert not [name for name in list_imports(file) if name.startswith("test_")], file.name
