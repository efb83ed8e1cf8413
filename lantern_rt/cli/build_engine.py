"""The commands on engines: `build-engine`, and `inspect` of what it made.

Does not know option parsing, nor how a backend builds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from ..bundle.files import Fact, open_bundle
from ..engines.build import BuildPlan, build_engines, plan_build
from ..engines.contracts import Progress
from ..engines.engine_folder import describe_engines, open_engine_folder, profile_line
from ..engines.profiles import BuildOptions
from ..errors import RequestError
from .tools import print_facts


def build_engine_command(
    name: str, options: BuildOptions, output: Path | None, dry_run: bool, as_json: bool, force: bool
) -> None:
    """Print what a build would take, or build."""
    bundle = open_bundle(name)
    if options.backend != "onnxruntime" and bundle.manifest.target.dtype == "float32":
        print(
            "note: this bundle computes in float32, and so will its plans; exported with --compute float16, they take "
            "half the memory",
            file=sys.stderr,
        )
    if dry_run:
        _print_plan(plan_build(bundle, options), options, as_json)
        return
    if output is None:
        raise RequestError("found no --output, expected a folder to write the engines to (or --dry-run)")
    with _progress() as say:
        manifest = build_engines(bundle, name, options, output, force, say)
    if as_json:
        print(json.dumps({"folder": str(output), "manifest": manifest.model_dump(mode="json")}))
        return
    for role, graph in manifest.graphs.items():
        size = sum(file.bytes for file in graph.files)
        print(f"{role}: {graph.seconds:.1f} s, {_mib(size)}", file=sys.stderr)
    print(output)


def inspect_engines_command(name: str, as_json: bool) -> None:
    """Check an engine folder's files and print what it says about itself."""
    engines = open_engine_folder(name)
    engines.check_files()
    if as_json:
        print(json.dumps({"folder": str(engines.folder), "manifest": engines.manifest.model_dump(mode="json")}))
    else:
        print_facts(describe_engines(engines))


def _print_plan(plan: BuildPlan, options: BuildOptions, as_json: bool) -> None:
    total = sum(part.total for part in plan.estimates)
    if as_json:
        profiles = {role: [shape.model_dump() for shape in shapes] for role, shapes in plan.profiles.items()}
        parts = [asdict(part) for part in plan.estimates]
        print(json.dumps({"estimates": parts, "total": total, "profiles": profiles}))
        return
    section = f"memory for {options.max_rows} rows and {options.max_nodes} nodes, estimated"
    facts = []
    for part in plan.estimates:
        sizes = {"weights": part.weights, "keys and values": part.cache, "activations": part.activations}
        facts.append(Fact(section, part.role, ", ".join(f"{k} {_mib(size)}" for k, size in sizes.items() if size)))
    facts.append(Fact(section, "total", _mib(total)))
    for role, shapes in plan.profiles.items():
        facts += [Fact(f"profiles of {role} (smallest/tuned for/largest)", s.name, profile_line(s)) for s in shapes]
    print_facts(facts)


@contextmanager
def _progress() -> Iterator[Progress]:
    """Shows each thing being done as a bar on stderr; one line for each where stderr is no terminal."""
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def say(what: str, done: int, total: int) -> None:
            if what not in seen:
                seen.add(what)
                print(what, file=sys.stderr)

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=max(1, total))
            bar.update(tasks[what], completed=done, total=max(1, total))

        yield show


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
