"""Mutation testing: find small changes of the runtime and the engines that the fast tests do not detect.

`python tests/mutation/mutate.py --seed 1 --count 60` chooses expressions at random. The program changes one expression
at a time in a copy of this checkout, and runs the tests of the changed file until a test fails. For each
mutation, the program prints whether a test failed (killed) or not (survived). A surviving mutation either does not
change the behavior or shows a missing test. CI does not run this program.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FILTERED_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "*.egg-info", "dist", "node_modules")
# Tests of every file to mutate. The first tests detect the most mutations.
TESTS = {
    "runtime/acceptance.py": "unit/acceptance unit/lantern_accept_golden unit/jacobi",
    "runtime/decode.py": "unit/decode unit/rows",
    "runtime/drafters.py": "unit/batch unit/decode unit/extending",
    "runtime/eagle.py": "unit/decode unit/row_ends unit/batch unit/prefixes onnxruntime/published_lantern",
    "runtime/eagle_slots.py": "unit/decode unit/row_ends unit/batch unit/prefixes onnxruntime/published_lantern",
    "runtime/groups.py": "unit/groups",
    "runtime/group_drafts.py": "unit/groups",
    "runtime/guidance.py": "unit/guidance unit/decode",
    "runtime/drafting.py": "unit/decode",
    "runtime/engine.py": "unit/decode",
    "runtime/raster.py": "unit/rows unit/row_ends",
    "runtime/jacobi.py": "unit/jacobi unit/batch",
    "runtime/likelihood.py": "unit/likelihood unit/row_ends unit/ties",
    "runtime/noise.py": "unit/noise unit/decode",
    "runtime/passes.py": "unit/prefixes unit/decode",
    "runtime/rows.py": "unit/rows",
    "runtime/filters.py": "unit/sampling unit/ties",
    "runtime/sampler.py": "unit/sampling unit/ties unit/likelihood unit/batch onnxruntime/device_sampling",
    "runtime/sampling.py": "unit/sampling unit/ties",
    "runtime/batch.py": "unit/batch unit/decode unit/ties unit/rows onnxruntime/device_sampling",
    "runtime/state.py": "unit/batch unit/row_ends unit/prefixes unit/rows unit/decode",
    "runtime/statistics.py": "unit/decode unit/ties unit/service",
    "runtime/target.py": "unit/decode unit/ties unit/jacobi unit/rows",
    "runtime/tree.py": "unit/tree unit/decode unit/hostile_files",
    "runtime/tree_names.py": "unit/tree unit/hostile_files",
    "engines/columns.py": "unit/columns onnxruntime/tensorrt_engine onnxruntime/device_engine",
    "engines/decoder_tensors.py": "onnxruntime/engine onnxruntime/device_engine",
    "engines/device_engine.py": "onnxruntime/device_engine onnxruntime/device_sampling onnxruntime/device_pictures",
    "engines/device_graph.py": "onnxruntime/device_layouts onnxruntime/device_engine onnxruntime/device_pictures",
    "engines/engine_folder.py": "unit/engine_folder unit/hostile_files",
    "engines/kv_cache.py": "unit/columns onnxruntime/engine onnxruntime/tensorrt_engine",
    "engines/graph_writer.py": "onnxruntime/device_layouts onnxruntime/engine export/t5 export/int8",
    "engines/host.py": "unit/host unit/large_requests",
    "engines/loader.py": "onnxruntime/loader onnxruntime/tensorrt_bundles unit/pipeline unit/embedding",
    "engines/sampling_head.py": "onnxruntime/device_sampling",
    "engines/ort/device.py": "onnxruntime/device_sampling onnxruntime/device_engine",
    "engines/ort/engine.py": "onnxruntime/engine onnxruntime/device_engine",
    "engines/ort/cache_pool.py": "onnxruntime/device_engine onnxruntime/tensorrt_engine",
}
# Hypothesis runs fixed examples and does not shrink failing examples, which would take minutes.
PROFILE = """
from hypothesis import Phase, settings
settings.register_profile("mutants", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
"""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn,
}  # fmt: skip


def generate_mutants(node: ast.AST) -> Iterator[ast.expr]:
    """Yield a mutated copy of every expression below a node that can be mutated."""
    for child in ast.iter_child_nodes(node):
        if _is_skipped(node, child):
            continue
        yield from generate_mutants(child)
        mutant = _mutate(child)
        if mutant is not None:
            yield ast.copy_location(mutant, child)


def _is_skipped(parent: ast.AST, node: ast.AST) -> bool:
    """Return whether a node is not mutated: an assertion, an error, an annotation, or an arbitrary limit.

    Tests need not detect mutations of these nodes.
    """
    if isinstance(node, ast.keyword):  # `copy=False` only saves time
        return node.arg in ("strict", "frozen", "init", "repr", "eq") or ast.unparse(node) == "copy=False"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift):  # a very large limit such as 1 << 20
        return isinstance(node.left, ast.Constant)
    if isinstance(parent, ast.Module) and isinstance(node, ast.Assign):  # a limit such as MAX_PASSES = 64
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, int) and node.value.value > 16
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) and parent.func.attr == "reshape":
        return isinstance(node, ast.UnaryOp)  # NumPy treats -1 and -2 in the same way
    annotations = (getattr(parent, "annotation", None), getattr(parent, "returns", None))
    return isinstance(node, (ast.Assert, ast.Raise, ast.JoinedStr)) or node in annotations


def _mutate(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        return ast.Compare(node.left, [SWAPS[type(node.ops[0])](), *node.ops[1:]], node.comparators)  # type: ignore[list-item]
    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in SWAPS:
        operands = {name: getattr(node, name) for name in node._fields if name != "op"}
        return type(node)(op=SWAPS[type(node.op)](), **operands)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert)):
        return node.operand
    if isinstance(node, ast.IfExp):
        return ast.IfExp(node.test, node.orelse, node.body)
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return ast.Constant(not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return ast.Constant(node.value + 1)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        return ast.Call(ast.Name({"min": "max", "max": "min"}[node.func.id]), node.args, node.keywords)
    return None


def apply_mutant(source: str, mutant: ast.expr) -> tuple[str, str]:
    """Return the source code with a mutant in place of the original expression, and a description of the change."""
    lines = source.splitlines(keepends=True)
    line_starts = [sum(len(line.encode()) for line in lines[:n]) for n in range(len(lines) + 1)]  # byte offsets
    start = line_starts[mutant.lineno - 1] + mutant.col_offset
    end = line_starts[(mutant.end_lineno or 0) - 1] + (mutant.end_col_offset or 0)
    data = source.encode()
    new_code = ast.unparse(mutant)
    old_code = " ".join(data[start:end].decode().split())
    description = f"{mutant.lineno}: {old_code}  ->  {new_code}  in  {lines[mutant.lineno - 1].strip()}"
    return (data[:start] + f"({new_code})".encode() + data[end:]).decode(), description


def run_tests(folder: Path, tests: Iterable[str], max_seconds: float, write_bytecode: bool = False) -> bool:
    """Run tests in a copy of the checkout; return whether all tests pass within the time limit."""
    paths = ["tests/{}/test_{}.py".format(*test.split("/")) for test in tests]
    options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=mutants"]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "" if write_bytecode else "1"}
    with (folder / "output.txt").open("w") as output:
        command = [sys.executable, "-m", "pytest", *options, *paths]
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment)
        try:
            return process.wait(max_seconds) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait() == 0


def main() -> None:
    """Run the tests for randomly chosen mutations and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--only", default="", help="mutate only files whose path begins with this text")
    options = parser.parse_args()
    sources = {path: (ROOT / path).read_text() for path in TESTS if path.startswith(options.only)}
    mutants = [(path, mutant) for path, source in sources.items() for mutant in generate_mutants(ast.parse(source))]
    chosen_mutants = random.Random(options.seed).sample(mutants, options.count)
    num_survivors = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "copy"
        shutil.copytree(ROOT, folder, ignore=FILTERED_OUT)
        with (folder / "tests" / "conftest.py").open("a") as conftest:
            conftest.write(PROFILE)
        start = time.monotonic()
        tests = dict.fromkeys(test for path, _ in chosen_mutants for test in TESTS[path].split())
        if not run_tests(folder, tests, 7200, write_bytecode=True):
            sys.exit("the tests fail without a mutation:\n" + (folder / "output.txt").read_text())
        max_seconds = 60 + time.monotonic() - start  # for the tests of a mutant
        for path, mutant in chosen_mutants:
            mutated_source, description = apply_mutant(sources[path], mutant)
            (folder / path).write_text(mutated_source)
            survived = run_tests(folder, TESTS[path].split(), max_seconds)
            (folder / path).write_text(sources[path])
            num_survivors += survived
            print(f"{'SURVIVED' if survived else 'killed  '} {path}:{description}", flush=True)
    print(f"{len(chosen_mutants) - num_survivors} of {len(chosen_mutants)} killed")


if __name__ == "__main__":
    main()
