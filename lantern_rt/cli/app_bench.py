"""The command `lantern-rt bench` and its options; what it does is in `cli_bench.py`.

Does not know models: options are passed on as given, None where the user said nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import CudaGraphs, Engines, Force, Json, Provider, Threads, WeightBudget

commands = typer.Typer()


@commands.command(
    epilog="""\b
Examples:
  lantern-rt bench scenes
  lantern-rt bench scenes --threads 1 --batch 4 --greedy --json
  lantern-rt bench scenes --sweep --images 16 --plot speed.png
  lantern-rt bench scenes --methods sjd:window=5,sjd:window=11,auto:quality=fast"""
)
def bench(
    bundle: Annotated[str, typer.Argument(help="Bundle folder, or the name of an embedded bundle.")],
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods to compare with ar, NAME:PARAMETER=VALUE:..., joined by commas, as in eval. "
            "[default: all that the bundle can run]"
        ),
    ] = None,
    quality: Annotated[
        list[str] | None,
        typer.Option(help="Budget of a row of auto; may be given several times. [default: strict, balanced]"),
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Also relax to several degrees.")] = False,
    images: Annotated[int, typer.Option(help="Images of every method, at least three turns.")] = 8,
    batch: Annotated[int, typer.Option(help="Images decoded together.")] = 1,
    threads: Threads = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Temperature 0.")] = False,
    prompts: Annotated[Path | None, typer.Option(help="Text file, one prompt a line. [default: the bundle's]")] = None,
    engines: Engines = None,
    provider: Provider = "cpu",
    cuda_graphs: CudaGraphs = False,
    weight_budget: WeightBudget = None,
    plot: Annotated[Path | None, typer.Option(help="Draw codes per second against quality, a .png file.")] = None,
    json: Json = False,
    force: Force = False,
) -> None:
    """Measure methods against ar, in turns on the same prompts and seeds. Best with nothing else running."""
    from .bench import BenchCommand, bench_command
    from .running import Running

    running = Running(threads, engines, provider, cuda_graphs, weight_budget)
    asked = BenchCommand(
        bundle, methods, tuple(quality or ()), sweep, images, batch, greedy, prompts, running, plot, json, force
    )
    bench_command(asked)
