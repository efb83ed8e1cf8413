"""The program `lantern-rt` and the commands that use bundles; those that make them are in `cli_app_bundles.py`.

What they do is in `cli_run.py` and `cli_tools.py`. Does not know models: options are passed on as given, None
where the user said nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app_bench import commands as bench_commands
from .app_bundles import commands as bundle_commands
from .options import CudaGraphs, Engines, Force, Json, Provider, Threads, WeightBudget

app = typer.Typer(
    name="lantern-rt",
    help="Image generation with relaxed speculative decoding.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  lantern-rt run --prompt "a red sphere on sand"
  lantern-rt inspect scenes
  lantern-rt doctor""",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        print(f"lantern-rt {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(
    epilog="""\b
Examples:
  lantern-rt run --prompt "a large red sphere left of a small blue cube on grass at sunset"
  lantern-rt run --prompt "a green cone on snow" --num-images 4 --output cones/ --scale 4
  lantern-rt run --prompt "a blue torus at night" --method lantern --delta 0.3 --neighbors 100
  lantern-rt run --prompt "a pink cube on sand" --method lantern++ --lambda 2 --trace cube.npz
  lantern-rt run --prompt "a red cone in the snow" --method sjd --window 8
  lantern-rt run --bundle bundles/llamagen-b --class-id 207 --method lantern --delta 0.2 --json"""
)
def run(
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="What to draw; may be given several times.")
    ] = None,
    class_id: Annotated[
        list[int] | None,
        typer.Option(
            "--class-id", metavar="ID", help="Class to draw, for class-conditional bundles; may be given several times."
        ),
    ] = None,
    bundle: Annotated[str, typer.Option(help="Bundle folder, or the name of an embedded bundle.")] = "scenes",
    method: Annotated[
        str | None,
        typer.Option(
            help="auto, ar, eagle, lantern, lantern++ or sjd. [default: auto if it knows enough, or the bundle's]"
        ),
    ] = None,
    quality: Annotated[
        str | None,
        typer.Option(
            help="What method auto may give away: strict (nothing), balanced, fast or TVD=x. [default: balanced]"
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            help="A .png file, or a folder (one that exists, or a new one in a folder that exists). "
            "[default: a name made of prompt and seed, in the current folder]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Image i of a prompt is drawn with seed + i.")] = 0,
    num_images: Annotated[int, typer.Option("--num-images", help="Images per prompt.")] = 1,
    cfg_scale: Annotated[
        float | None, typer.Option("--cfg-scale", help="Guidance; 1 is off. [default: the bundle's]")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [default: the bundle's]")] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Keep the k likeliest codes; 0 is off. [default: the bundle's]")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Keep this much probability; 1 is off. [default: the bundle's]")
    ] = None,
    neighbors: Annotated[
        int | None,
        typer.Option(help="How many nearby codes may lend probability (lantern, lantern++). [default: the bundle's]"),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Bound of lantern on what is lent, between 0 and 1; sjd takes it too. [default: the bundle's]"
        ),
    ] = None,
    lambda_: Annotated[
        float | None,
        typer.Option("--lambda", help="Bound of lantern++, above 1; sjd takes it too. [default: the bundle's]"),
    ] = None,
    omega: Annotated[
        float | None,
        typer.Option(help="Accept codes this many times as readily, above 1 (lantern, lantern++, sjd). [default: off]"),
    ] = None,
    anneal: Annotated[
        float | None, typer.Option(help="How much of omega - 1 each further depth keeps, 0 .. 1. [default: 1]")
    ] = None,
    tree: Annotated[
        str | None,
        typer.Option(help="Draft tree: a name such as chain-4 or mc-25, or a .json file. [default: the bundle's]"),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Codes that sjd drafts ahead, 1 .. 128. [default: the bundle's]")
    ] = None,
    threads: Threads = None,
    engines: Engines = None,
    provider: Provider = "cpu",
    cuda_graphs: CudaGraphs = False,
    weight_budget: WeightBudget = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write every draft tree to this .npz, and a picture to NAME.trace.png.")
    ] = None,
    scale: Annotated[int, typer.Option(help="Enlarge the PNG this many times, 1 .. 16, bicubic.")] = 1,
    json: Json = False,
    force: Force = False,
) -> None:
    """Turn prompts (or class ids) into PNG files.

    Paths of the files go to stdout, progress and a line of statistics to stderr.
    """
    from .run import Run, run_command
    from .running import Running

    options = {
        "method": method,
        "cfg_scale": cfg_scale,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "neighbors": neighbors,
        "delta": delta,
        "lambda_": lambda_,
        "tree": tree,
        "quality": quality,
        "window": window,
        "omega": omega,
        "anneal": anneal,
    }
    run_command(
        Run(
            prompt or None,
            class_id or None,
            bundle,
            output,
            seed,
            num_images,
            Running(threads, engines, provider, cuda_graphs, weight_budget),
            trace,
            scale,
            json,
            force,
        ),
        options,
    )


@app.command(
    epilog="""\b
Examples:
  lantern-rt inspect scenes
  lantern-rt inspect bundles/llamagen-b --json
  lantern-rt inspect engines/scenes-cpu"""
)
def inspect(
    bundle: Annotated[
        str, typer.Argument(help="Bundle folder, or the name of an embedded bundle, or an engine folder.")
    ],
    json: Json = False,
) -> None:
    """Check a bundle or an engine folder, hashes included, and print what it says about itself."""
    from .tools import inspect_command

    inspect_command(bundle, json)


@app.command(
    epilog="""\b
Examples:
  lantern-rt doctor
  lantern-rt doctor --json"""
)
def doctor(json: Json = False) -> None:
    """Print versions, backends, cores and memory, what will be used, and what is wrong (exit code 2 if so)."""
    from .tools import doctor_command

    doctor_command(json)


app.add_typer(bundle_commands)
app.add_typer(bench_commands)
