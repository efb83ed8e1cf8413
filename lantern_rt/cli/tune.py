"""The `tune` command: races of `auto`, run to their end now instead of on the first requests."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..auto.store import tuning_path
from ..compare.tune import tune as run_races
from ..compare.turns import read_bundle_prompts
from ..errors import RequestError
from ..inputs import whole
from .console import print_json, print_table, print_text, progress, say
from .options import (
    BundleArgument,
    EngineOptions,
    EnginesOption,
    JsonOption,
    PromptsOption,
    ProviderOption,
    ThreadsOption,
)

EXAMPLES = """
lantern-rt tune scenes
lantern-rt tune scenes --batch 8
lantern-rt tune scenes --minutes 2
"""
_COLUMNS = {"quality": "{quality}", "fastest method": "{method}", "speed-up": "{speed_up:.2f}"}


def tune(
    bundle: BundleArgument = "scenes",
    batch: Annotated[int, typer.Option(help="Images decoded together, as in later use.")] = 1,
    greedy: Annotated[bool, typer.Option("--greedy", help="For requests of temperature 0.")] = False,
    prompts: PromptsOption = None,
    minutes: Annotated[float, typer.Option(help="After these it ends with the best so far.")] = 10,
    threads: ThreadsOption = None,
    engines: EnginesOption = None,
    provider: ProviderOption = None,
    json: JsonOption = False,
) -> None:
    """Find what draws each quality's images fastest on this host, before the first request.

    Methods that draw the very same images race on prompts, and winners are kept. Best with nothing else running.
    """
    whole("batch", batch, 1, 1, 64)
    if not 0 < minutes < 1e6:
        raise RequestError(field="minutes", found=f"{minutes:g}", expected="a number above 0")
    options = EngineOptions(threads, engines, provider)
    opened = options.open_bundle(bundle)
    drawn = read_bundle_prompts(opened, prompts)
    pipeline = options.load(opened)
    say(f"this takes {minutes:g} minutes at most")
    with progress() as show:
        results = run_races(pipeline, drawn, batch, 0.0 if greedy else None, 60 * minutes, show)
    path = tuning_path(opened.digest)
    if json:
        facts: dict[str, Any] = {"bundle": opened.manifest.name, "bundle_digest": opened.digest, "path": str(path)}
        facts |= {"backend": pipeline.engines.backend, "threads": pipeline.engines.threads, "greedy": greedy}
        print_json({**facts, "qualities": [result._asdict() for result in results]})
        return
    print_table(_COLUMNS, [result._asdict() for result in results])
    provisional = [f"{one.quality} is provisional: {one.provisional}" for one in results if one.provisional]
    kept = f"kept in {path}; delete it to race anew" if path.exists() else "there was nothing to race"
    print_text(*provisional, kept)
