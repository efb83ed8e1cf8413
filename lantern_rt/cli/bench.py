"""The `bench` command: compares the speed of decoding methods, as a table or JSON."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .. import __version__
from ..compare.bench import describe_fastest_method, list_default_methods, run_bench, summarize_runs
from ..compare.prompts import MAX_FIRST_SEED, read_bundle_prompts
from ..compare.turns import parse_methods
from ..engines.host import describe_processor
from ..errors import RequestError
from ..inputs import check_int
from ..methods import SAMPLING
from ..output.tables import format_csv_table
from ..pipeline import Pipeline
from .console import print_json, print_table, print_text, show_progress
from .options import (
    BundleArgument,
    EngineOptions,
    EnginesOption,
    FirstSeedOption,
    JsonOption,
    MethodsOption,
    PromptsOption,
    ProviderOption,
    QualitiesOption,
    ThreadsOption,
    add_request_options,
)

EXAMPLES = """
lantern-rt bench scenes
lantern-rt bench scenes --method sjd:window=5 --method sjd:window=11 --count 16
lantern-rt bench scenes --batch 4 --threads 1
"""
COLUMNS = {
    "method": "{method}",
    "images/s": "{images_per_second:.3g}",
    "speed-up": "{speed_up:.2f} ({speed_up_interval[low]:.2f} .. {speed_up_interval[high]:.2f})",
    "tokens per pass": "{tokens_per_forward_pass:.2f}",
    "exact": "{exact_word}",
}


@add_request_options("json", SAMPLING)
def bench(
    bundle: BundleArgument = "scenes",
    method: MethodsOption = None,
    quality: QualitiesOption = None,
    count: Annotated[int, typer.Option(help="Minimum number of images per method, in at least three batches.")] = 8,
    batch: Annotated[int, typer.Option(help="Batch size in images.")] = 1,
    prompts: PromptsOption = None,
    seed: FirstSeedOption = 10_000,
    threads: ThreadsOption = None,
    engines: EnginesOption = None,
    provider: ProviderOption = None,
    json: JsonOption = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print all numbers as CSV, and nothing else.")] = False,
    **sampling: Any,
) -> None:
    """Compare the speed of decoding methods with that of plain decoding (ar).

    The methods run in turns, on the same prompts and seeds. Without --method and --quality, all methods that the bundle
    can run are measured. Other programs on this host should be idle during the measurement. --json and --csv also give
    shares of time and the likelihood of the tokens.
    """
    if json and csv:
        raise RequestError("cannot be combined with --json", field="csv", remedy="give one of them")
    check_int("count", count, 8, 1, 10_000)
    check_int("batch", batch, 1, 1, 64)
    check_int("seed", seed, 10_000, 0, MAX_FIRST_SEED)
    options = EngineOptions(threads, engines, provider)
    opened = options.open_bundle(bundle)
    labels = method or ([] if quality else list_default_methods(opened.manifest))
    qualities = quality or ([] if method else [*opened.manifest.presets])
    methods = parse_methods(labels, sampling, opened, qualities)
    prompt_set = read_bundle_prompts(opened, prompts)
    pipeline = options.load_pipeline(opened)
    with show_progress() as progress:
        runs = run_bench(pipeline, methods, prompt_set, batch, count, progress, seed)
    rows = [summarize_runs(run, runs[0]) for run in runs]
    facts = describe_pipeline(pipeline)
    if json:
        print_json({**facts, "batch": batch, "rows": rows})
        return
    if csv:
        print_text(format_csv_table(rows).removesuffix("\n"))
        return
    for row in rows:
        row["exact_word"] = "yes" if row["exact"] else "no"
    print_text(f"{facts['bundle']} ({opened.digest[:12]}), {facts['backend']}, threads: {facts['threads']}")
    print_table(COLUMNS, rows)
    turns = f"{len(runs[0])} turns, batch size {batch}; speed-ups are medians over the turns, with 95 % intervals"
    print_text(turns, describe_fastest_method(rows))


def describe_pipeline(pipeline: Pipeline) -> dict[str, Any]:
    return {
        "lantern_rt": __version__,
        "bundle": pipeline.bundle.manifest.name,
        "bundle_digest": pipeline.bundle.digest,
        "processor": describe_processor(),
        "backend": pipeline.engines.backend,
        "image_decoder": pipeline.engines.image_backend,
        "threads": pipeline.engines.threads,
    }
