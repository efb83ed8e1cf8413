"""Measure the time from the name of a published model to the first image, by an export and with a finished bundle.

    python benchmarks/first_image.py --name llamagen-c2i-b-256 --shape GPT-B --python base/bin/python

Weights are random. A local server stands in for the Hugging Face Hub, so that no network is measured. All caches are
empty. The interpreter `--python`, which needs no PyTorch, runs the model from the finished bundle. The program prints
the downloaded megabytes, the elapsed seconds and the CPU seconds of all cores. There is no pass or fail.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from random_bundle import SHAPES, write_checkpoints

from lantern_rt import open_bundle, published

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "export"))

from stand_in_hub import COMMIT, COMPLETED_BYTES, REPOSITORIES, environment, serve_hub

RUN = """
import sys
from pathlib import Path
from lantern_rt import published
from lantern_rt.cli.main import main
published.TABLE = Path(sys.argv.pop(1))
main(sys.argv[1:])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", choices=published.load_published_models(), default="llamagen-c2i-b-256")
    parser.add_argument("--shape", choices=SHAPES, default="GPT-B")
    parser.add_argument("--python", default=sys.executable, help="interpreter for the finished bundle")
    arguments = parser.parse_args()
    name = arguments.name
    model = published.find_published_model(arguments.name)
    with tempfile.TemporaryDirectory() as work, serve_hub() as hub:
        folder = Path(work)
        write_checkpoints(SHAPES[arguments.shape], folder / "checkpoints", drafter="drafter" in model.files)
        options = {"grid": SHAPES[arguments.shape].grid} if "grid" in model.options else {}
        row = model.model_dump() | {"files": publish_checkpoints(folder / "checkpoints"), "options": options}
        condition = ["--class-id", "3"] if model.classes else ["a red fox"]

        def measure_first_image(label: str, python: str) -> Path:
            """Run the model with empty caches, print the figures, and return the folder of the cached bundle."""
            (folder / "models.json").write_text(json.dumps({name: row}))
            home = folder / label
            cpu = measure_child_cpu_seconds()
            start = time.perf_counter()
            command = [python, "-c", RUN, str(folder / "models.json"), "run", name, *condition, "--yes"]
            home.mkdir()
            variables = environment(hub, home / "hub", LANTERN_RT_CACHE=str(home / "bundles"))
            subprocess.run(command, env=variables, cwd=home, check=True, capture_output=True)
            seconds = time.perf_counter() - start
            size = COMPLETED_BYTES.total() / 1e6
            print(
                f"{label}: {size:.0f} MB, {seconds:.1f} s, {measure_child_cpu_seconds() - cpu:.1f} s of all cores",
                flush=True,
            )
            COMPLETED_BYTES.clear()
            return home / "bundles" / f"{name}@{published.choose_default_precision()}"

        bundle = open_bundle(measure_first_image("export", sys.executable))
        files = {path.name: path.read_bytes() for path in bundle.folder.iterdir()}
        REPOSITORIES["owner/finished"] = files
        finished = {"reference": f"hf:owner/finished@{COMMIT}", "digest": bundle.digest}
        row["bundles"] = {
            published.choose_default_precision(): finished | {"download_bytes": sum(map(len, files.values()))}
        }
        measure_first_image("finished bundle", arguments.python)


def publish_checkpoints(folder: Path) -> dict[str, str]:
    """Upload each checkpoint to a repository of the stand-in hub.

    Returns:
        The references `hf:...` of the checkpoints, by option of `lantern-rt export`.
    """
    references = {}
    for path in folder.iterdir():
        role = path.name.partition(".")[0].replace("vqgan", "vq")
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        base = path.parent if path.is_file() else path
        REPOSITORIES[f"owner/{role}"] = {file.relative_to(base).as_posix(): file.read_bytes() for file in files}
        references[role] = f"hf:owner/{role}/{path.name}" if path.is_file() else f"hf:owner/{role}"
    return references


def measure_child_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
