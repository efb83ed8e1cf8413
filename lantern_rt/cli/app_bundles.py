"""The commands of `lantern-rt` that make, measure and check bundles, and their options.

What they do is in `cli_tools.py`, `cli_engines.py`, `cli_tune.py`, `cli_eval.py` and `cli_verify.py`. Does not know
models: options are passed on as given, None where the user said nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import RequestError
from .options import CudaGraphs, Engines, Force, Json, Provider, Threads, WeightBudget

commands = typer.Typer()


@commands.command(
    epilog="""\b
Examples:
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
        str | None,
        typer.Option(
            help="How weights are stored: fp32, fp16, bf16-safe, int8-weights or int4-weights. [default: fp32]"
        ),
    ] = None,
    drafter_precision: Annotated[
        str | None, typer.Option("--drafter-precision", help="The same for the drafter. [default: --precision]")
    ] = None,
    compute: Annotated[
        str, typer.Option(help="What target and drafter compute in: float32, or float16 for GPUs.")
    ] = "float32",
    force: Force = False,
) -> None:
    """Turn a checkpoint into a bundle, and check every graph against it. Needs lantern-rt[cpu,export]."""
    from .families import Checkpoints
    from .tools import export_command

    given = Checkpoints(target, vq, drafter, text_encoder, model, config, grid)
    export_command(family, given, output, name, force, precision, drafter_precision, compute)


@commands.command(
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
        bool, typer.Option("--weight-streaming", help="Let `run --weight-budget` keep weights in host memory.")
    ] = False,
    refit: Annotated[bool, typer.Option("--refit", help="Allow weights to be replaced later.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print memory and shapes, build nothing.")] = False,
    json: Json = False,
    force: Force = False,
) -> None:
    """Turn a bundle into what this host (or a GPU) runs fastest; `run --engines` runs it."""
    from ..engines.profiles import BuildOptions
    from .build_engine import build_engine_command

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


@commands.command(
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
    threads: Threads = None,
    engines: Engines = None,
    provider: Provider = "cpu",
    cuda_graphs: CudaGraphs = False,
    weight_budget: WeightBudget = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file, one prompt a line, to measure with. [default: the bundle's]")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [default: the bundle's]")] = None,
    acceptance_statistics: Annotated[
        Path | None,
        typer.Option(
            "--acceptance-statistics",
            help="Also write the statistics found, for a bundle to bring along; adds to what was found before.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw costs of passes and expected speed by size of a draft, a .png file.")
    ] = None,
    json: Json = False,
    force: Force = False,
) -> None:
    """Measure what is fastest here for a bundle, and keep it for method auto. Best with nothing else running."""
    from .running import Running
    from .tune import Tune, tune_command

    running = Running(threads, engines, provider, cuda_graphs, weight_budget)
    tune_command(
        Tune(bundle, minutes, quality, images, prompts, temperature, running, acceptance_statistics, plot, json, force)
    )


@commands.command(
    name="eval",
    epilog="""\b
Examples:
  lantern-rt eval scenes --methods ar,sjd,eagle,lantern++
  lantern-rt eval scenes --methods sjd,sjd:lambda=2,lantern++:lambda=3:tree=chain-4 --count 32 --seeds 4
  lantern-rt eval bundles/t2i --methods auto --prompts captions.txt --features inception.onnx --feature-size 299
  lantern-rt eval bundles/t2i --prompts captions.txt --agreement clip.onnx --agreement-tokenizer tokenizer.json""",
)
def evaluate(
    bundle: Annotated[str, typer.Argument(help="Bundle folder, or the name of an embedded bundle.")],
    methods: Annotated[
        str,
        typer.Option(
            help="Methods to compare with ar, each with parameters if need be, NAME:PARAMETER=VALUE:..., "
            "joined by commas; parameters are those of run."
        ),
    ] = "ar,sjd,eagle,lantern++",
    prompts: Annotated[Path | None, typer.Option(help="Text file, one prompt a line. [default: the bundle's]")] = None,
    count: Annotated[
        int | None, typer.Option(help="Use the first so many prompts, or so many classes. [default: all; 64 classes]")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Pictures per prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Picture i is drawn with seed + i, alike in all methods.")] = 0,
    features: Annotated[
        Path | None,
        typer.Option(
            help="ONNX graph from pictures to features, such as Inception. [default: the bundle's VQ encoder]"
        ),
    ] = None,
    feature_size: Annotated[
        int | None,
        typer.Option("--feature-size", help="Width and height of pictures for --features. [default: its own]"),
    ] = None,
    feature_mean: Annotated[
        str | None,
        typer.Option("--feature-mean", help="Taken off RGB values 0 .. 1: a number, or three, by commas. [default: 0]"),
    ] = None,
    feature_std: Annotated[
        str | None, typer.Option("--feature-std", help="What they are then divided by. [default: 1]")
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            help="Bandwidth of the kernel distance; 10 for CMMD. [default: the median distance between features]"
        ),
    ] = None,
    agreement: Annotated[
        Path | None,
        typer.Option(
            help="ONNX graph from pictures and token ids to how well they agree, such as CLIP. [default: none]"
        ),
    ] = None,
    agreement_tokenizer: Annotated[
        Path | None,
        typer.Option("--agreement-tokenizer", help="Its tokenizer.json. [default: the bundle's list of words]"),
    ] = None,
    agreement_size: Annotated[
        int | None, typer.Option("--agreement-size", help="As --feature-size, for --agreement.")
    ] = None,
    agreement_mean: Annotated[
        str | None, typer.Option("--agreement-mean", help="As --feature-mean, for --agreement.")
    ] = None,
    agreement_std: Annotated[
        str | None, typer.Option("--agreement-std", help="As --feature-std, for --agreement.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for report.html and eval.json. [default: eval-NAME, here]")
    ] = None,
    cfg_scale: Annotated[
        float | None, typer.Option("--cfg-scale", help="Guidance; 1 is off. [default: the bundle's]")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Above 0. [default: the bundle's]")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="0 is off. [default: the bundle's]")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="1 is off. [default: the bundle's]")] = None,
    images: Annotated[int, typer.Option(help="Pictures decoded together; changes none of them.")] = 8,
    threads: Threads = None,
    engines: Engines = None,
    provider: Provider = "cpu",
    cuda_graphs: CudaGraphs = False,
    weight_budget: WeightBudget = None,
    json: Json = False,
    force: Force = False,
) -> None:
    """Compare methods with plain decoding, on the same prompts and seeds. Needs lantern-rt[cpu,eval]."""
    from .evaluate import Eval, eval_command
    from .evaluation_graphs import GivenGraph, GivenInstruments
    from .running import Running

    sampling = {"cfg_scale": cfg_scale, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    instruments = GivenInstruments(
        GivenGraph(features, feature_size, feature_mean, feature_std),
        bandwidth,
        GivenGraph(agreement, agreement_size, agreement_mean, agreement_std),
        agreement_tokenizer,
    )
    running = Running(threads, engines, provider, cuda_graphs, weight_budget)
    asked = Eval(bundle, methods, prompts, count, seeds, seed, images, running, instruments, output, json, force)
    eval_command(asked, sampling)


@commands.command(
    epilog="""\b
Examples:
  lantern-rt verify scenes
  lantern-rt verify bundles/llamagen-b --against c2i_B_256.pt --vq vq_ds16_c2i.pt --report b.html"""
)
def verify(
    bundle: Annotated[str, typer.Argument(help="Bundle folder, or the name of an embedded bundle.")],
    against: Annotated[
        Path | None,
        typer.Option(
            help="The target's checkpoint, a path or hf:owner/name as in export. Without it, ONNX's reference "
            "evaluator on small inputs."
        ),
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
    from .families import Checkpoints
    from .verify import verify_command

    if against is None and any((vq, drafter, text_encoder, model, config)):
        raise RequestError("verify: found checkpoint options without --against, expected the target's there")
    given = None if against is None else Checkpoints(against, vq, drafter, text_encoder, model, config)
    verify_command(bundle, given, report, json, force)
