"""The program `lantern-rt` and the commands that use bundles; those that make them are in `cli_app_bundles.py`.

What they do is in `cli_run.py` and `cli_tools.py`. Does not know models: options are passed on as given, None
where the user said nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_app_bundles import commands
from .cli_options import Force, Json

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
        from . import __version__

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
    children: Annotated[
        str | None, typer.Option(help="Children in a static tree: sampled, or likeliest. [default: sampled]")
    ] = None,
    stop: Annotated[
        float | None,
        typer.Option(
            help="Draft no deeper in a static tree once all its paths have less probability, 0 .. 1. [default: off]"
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Codes that sjd drafts ahead, 1 .. 128. [default: the bundle's]")
    ] = None,
    redraft: Annotated[
        str | None, typer.Option(help="How sjd re-drafts: coupled or independent. [default: the bundle's]")
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(help="First draft of a position (sjd): random, left or above. [default: the bundle's]"),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of the engine. [default: one per core]")] = None,
    engines: Annotated[
        Path | None, typer.Option(help="Folder made by build-engine from this bundle, to run instead of its graphs.")
    ] = None,
    provider: Annotated[
        str, typer.Option(help="What ONNX Runtime runs on: cpu, cuda, openvino, coreml or directml.")
    ] = "cpu",
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
    from .cli_run import Run, run_command
    from .requests import Options

    options = Options(
        method=method,
        cfg_scale=cfg_scale,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        neighbors=neighbors,
        delta=delta,
        lambda_=lambda_,
        tree=tree,
        quality=quality,
        children=children,
        stop=stop,
        window=window,
        redraft=redraft,
        start=start,
        omega=omega,
        anneal=anneal,
    )
    run_command(
        Run(
            prompt or None,
            class_id or None,
            bundle,
            output,
            seed,
            num_images,
            threads,
            engines,
            provider,
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
<<<<<<< HEAD
=======
  lantern-rt export --family llamagen --target c2i_B_256.pt --model GPT-B \\
      --vq vq_ds16_c2i.pt --output bundles/llamagen-b
  lantern-rt export --family llamagen --target t2i_XL_256.pt --model GPT-XL \\
      --vq vq_ds16_t2i.pt --drafter drafter-xl/ --output bundles/llamagen-xl --force
  lantern-rt export --family llamagen --target hf:jadohu/LlamaGen-T2I --drafter hf:jadohu/llamagen_drafter \\
      --vq hf:peizesun/llamagen_t2i/vq_ds16_t2i.pt --text-encoder hf:google/flan-t5-xl --output bundles/text
  lantern-rt export --family anole --target Anole-7b-v0.1-hf/ --vq chameleon-vqgan/ \\
      --drafter anole-drafter/ --output bundles/anole
  lantern-rt export --family janus --target Janus-Pro-1B/ --output bundles/janus"""
)
def export(
    target: Annotated[
        Path, typer.Option(help="Checkpoint of the target: a file or folder, or hf:owner/name[/file][@revision].")
    ],
    output: Annotated[Path, typer.Option(help="Bundle folder to write.")],
    vq: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint of the VQ model: a file, or hf:owner/name/file[@revision]; for anole also a folder with "
            "vqgan.ckpt and vqgan.yaml."
        ),
    ] = None,
    family: Annotated[str, typer.Option(help="Model family: llamagen, anole or janus.")] = "llamagen",
    drafter: Annotated[
        Path | None, typer.Option(help="Folder of an EAGLE drafter in LANTERN's layout, or hf:owner/name[@revision].")
    ] = None,
    text_encoder: Annotated[
        Path | None,
        typer.Option(
            "--text-encoder",
            help="Folder of flan-t5-xl, or hf:google/flan-t5-xl: the bundle then takes prompts instead of embeddings.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Size by name, such as GPT-XL, where the weights do not tell.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="JSON file with sizes that the weights do not tell.")] = None,
    grid: Annotated[int | None, typer.Option(help="Codes per side of an image, where the weights do not tell.")] = None,
    name: Annotated[str | None, typer.Option(help="The bundle's name. [default: the output folder's]")] = None,
    precision: Annotated[
        str, typer.Option(help="How weights are stored: fp32, fp16, bf16-safe, int8-weights or int4-weights.")
    ] = "fp32",
    drafter_precision: Annotated[
        str | None, typer.Option("--drafter-precision", help="The same for the drafter. [default: --precision]")
    ] = None,
    force: Force = False,
) -> None:
    """Turn a checkpoint into a bundle, and check every graph against it. Needs lantern-rt[cpu,export]."""
    from .cli_tools import export_command

    export_command(
        family,
        target,
        vq,
        output,
        drafter,
        text_encoder,
        model,
        config,
        grid,
        name,
        force,
        precision,
        drafter_precision,
    )


@app.command(
    name="build-engine",
    epilog="""\b
Examples:
  lantern-rt build-engine scenes --backend onnxruntime --output engines/scenes-cpu
  lantern-rt run --engines engines/scenes-cpu --prompt "a red sphere on sand"
  lantern-rt build-engine bundles/llamagen-xl --backend tensorrt-rtx --compute-capability SM89 \\
      --compute-capability SM120 --max-rows 8 --max-nodes 64 --output engines/llamagen-xl-rtx
  lantern-rt build-engine bundles/llamagen-xl --backend tensorrt --dry-run""",
)
def build_engine(
    bundle: Annotated[str, typer.Argument(help="Bundle folder, or the name of an embedded bundle.")],
    backend: Annotated[str, typer.Option(help="onnxruntime, tensorrt or tensorrt-rtx.")] = "onnxruntime",
    output: Annotated[Path | None, typer.Option(help="Engine folder to write; not needed with --dry-run.")] = None,
    provider: Annotated[str, typer.Option(help="With onnxruntime: cpu, cuda, openvino, coreml or directml.")] = "cpu",
    max_rows: Annotated[
        int, typer.Option("--max-rows", help="Sequences per pass; guidance makes two of every image.")
    ] = 8,
    max_nodes: Annotated[int, typer.Option("--max-nodes", help="New nodes per pass, at least the tree's.")] = 64,
    max_past: Annotated[
        int | None, typer.Option("--max-past", help="Committed columns. [default: prefix, codes and one tree]")
    ] = None,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(
            "--compute-capability",
            metavar="SM",
            help="GPU to build for, such as SM89; may be given several times. [default: this host's]",
        ),
    ] = None,
    optimization_level: Annotated[
        int | None, typer.Option("--optimization-level", help="How long the builder may search, 0 .. 5.")
    ] = None,
    workspace: Annotated[
        int | None, typer.Option(help="MiB that intermediate results may take. [default: all of the GPU]")
    ] = None,
    timing_cache: Annotated[
        Path | None, typer.Option("--timing-cache", help="File of measured kernel times, read and written.")
    ] = None,
    hardware_compatible: Annotated[
        bool, typer.Option("--hardware-compatible", help="With tensorrt: run on every GPU from Ampere on.")
    ] = False,
    weight_streaming: Annotated[
        bool, typer.Option("--weight-streaming", help="Keep weights in host memory where they do not fit.")
    ] = False,
    refit: Annotated[bool, typer.Option("--refit", help="Allow weights to be replaced later.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print memory and shapes, build nothing.")] = False,
    json: Json = False,
    force: Force = False,
) -> None:
    """Turn a bundle into what this host (or a GPU) runs fastest; `run --engines` runs it."""
    from .cli_engines import build_engine_command
    from .engines.profiles import BuildOptions

    options = BuildOptions(
        backend=backend,
        provider=provider,
        max_rows=max_rows,
        max_nodes=max_nodes,
        max_past=max_past,
        optimization_level=optimization_level,
        workspace=None if workspace is None else workspace << 20,
        timing_cache=timing_cache,
        compute_capabilities=tuple(compute_capability or ()),
        hardware_compatible=hardware_compatible,
        weight_streaming=weight_streaming,
        refit=refit,
    )
    build_engine_command(bundle, options, output, dry_run, json, force)


@app.command(
    epilog="""\b
Examples:
  lantern-rt tune scenes
  lantern-rt tune scenes --quality strict --minutes 2
  lantern-rt tune bundles/llamagen-b --images 8 --quality TVD=0.1 --json"""
)
def tune(
    bundle: Annotated[str, typer.Argument(help="Bundle folder, or the name of an embedded bundle.")],
    minutes: Annotated[float, typer.Option(help="How long to measure, about.")] = 5,
    quality: Annotated[
        str, typer.Option(help="What may be given away: strict (nothing), balanced, fast, or TVD=x per code.")
    ] = "balanced",
    images: Annotated[int, typer.Option(help="Images decoded together, as in later use.")] = 1,
    threads: Annotated[int | None, typer.Option(help="Threads of the engine. [default: one per core]")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file, one prompt a line, to measure with. [default: the bundle's]")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [default: the bundle's]")] = None,
    rates: Annotated[
        Path | None,
        typer.Option(help="Also write the rates found, for a bundle to bring along; adds to what was found before."),
    ] = None,
    json: Json = False,
    force: Force = False,
) -> None:
    """Measure what is fastest here for a bundle, and keep it for method auto. Best with nothing else running."""
    from .cli_tune import Tune, tune_command

    tune_command(Tune(bundle, minutes, quality, images, threads, prompts, temperature, rates, json, force))


@app.command(
    epilog="""\b
Examples:
  lantern-rt verify scenes
  lantern-rt verify bundles/llamagen-b --against c2i_B_256.pt --vq vq_ds16_c2i.pt --report b.html"""
)
def verify(
    bundle: Annotated[str, typer.Argument(help="Bundle folder, or the name of an embedded bundle.")],
    against: Annotated[
        Path | None,
        typer.Option(help="The target's checkpoint. Without it, ONNX's reference evaluator on small inputs."),
    ] = None,
    vq: Annotated[Path | None, typer.Option(help="Checkpoint of the VQ model, with --against.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="Folder of the drafter, with --against.")] = None,
    text_encoder: Annotated[
        Path | None, typer.Option("--text-encoder", help="Folder of the text encoder, with --against.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Size by name, as in export.")] = None,
    config: Annotated[Path | None, typer.Option(help="JSON file with sizes, as in export.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the tables to this .html as well.")] = None,
    json: Json = False,
    force: Force = False,
) -> None:
    """Compare a bundle's graphs with what they were made from (exit code 2 if they differ).

    Needs lantern-rt[cpu,export].
    """
    from .cli_verify import Checkpoints, verify_command

    verify_command(bundle, Checkpoints(against, vq, drafter, text_encoder, model, config), report, json, force)


@app.command(
    epilog="""\b
Examples:
>>>>>>> 961cf0c (Tune and auto know sjd, omega, likeliest children and early stops; versioned rates; auto is the default where something is known)
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
    from .cli_tools import inspect_command

    inspect_command(bundle, json)


@app.command(
    epilog="""\b
Examples:
  lantern-rt doctor
  lantern-rt doctor --json"""
)
def doctor(json: Json = False) -> None:
    """Print versions, backends, cores and memory, what will be used, and what is wrong (exit code 2 if so)."""
    from .cli_tools import doctor_command

    doctor_command(json)


app.add_typer(commands)
