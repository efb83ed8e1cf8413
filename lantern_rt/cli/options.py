"""Options that several commands share, and what opens bundles and pipelines by them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engines.ort.providers import DEFAULT_PROVIDER, Providers

if TYPE_CHECKING:
    from ..bundle.files import Bundle
    from ..pipeline import Pipeline
    from ..requests import Settings

SUBJECTS, OUTPUT, METHOD, SAMPLING, ENGINE = "What to draw", "Output", "Method", "Sampling", "Engine"  # groups in help

BundleArgument = Annotated[
    str, typer.Argument(help="Bundle folder, name of an embedded bundle, or hf:owner/name[@revision].")
]
PromptsOption = Annotated[
    Path | None,
    typer.Option("--prompts", help="Text file, one prompt a line. [default: the bundle's]", rich_help_panel=SUBJECTS),
]
EmbeddingsOption = Annotated[
    Path | None,
    typer.Option(
        "--embeddings",
        metavar="NPZ",
        help="For bundles of text embeddings: a file with `embeddings [prompts, tokens, dim]`, padded on the right, "
        "and with `mask [prompts, tokens]` if some are padded.",
        rich_help_panel=SUBJECTS,
    ),
]
MethodsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        metavar="NAME[:PARAMETER=VALUE]...",
        help="Such as sjd:window=5; may be given several times.",
        rich_help_panel=METHOD,
    ),
]
QualitiesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--quality",
        help="Preset of the bundle: strict, balanced or fast; may be given several times.",
        rich_help_panel=METHOD,
    ),
]
CfgScaleOption = Annotated[
    float | None,
    typer.Option("--cfg-scale", help="Guidance; 1 is off. [default: the bundle's]", rich_help_panel=SAMPLING),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option("--temperature", help="0 is greedy. [default: the bundle's]", rich_help_panel=SAMPLING),
]
TopKOption = Annotated[
    int | None,
    typer.Option(
        "--top-k", help="Keep the k most probable tokens; 0 is off. [default: the bundle's]", rich_help_panel=SAMPLING
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        "--top-p", help="Keep this much probability; 1 is off. [default: the bundle's]", rich_help_panel=SAMPLING
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", help="Threads of the engine. [default: one per core]", rich_help_panel=ENGINE),
]
EnginesOption = Annotated[
    Path | None,
    typer.Option(
        "--engines",
        help="Folder made by build-engine from this bundle, to run instead of its graphs.",
        rich_help_panel=ENGINE,
    ),
]
ProviderOption = Annotated[
    list[str] | None,
    typer.Option(
        "--provider",
        metavar="[GRAPH=]NAME",
        help="What ONNX Runtime runs on: cpu, cuda, webgpu, openvino, ... (docs/gpu.md). Once more for one graph, "
        "such as drafter=cpu. [default: auto, the GPU if there is one, else the CPU]",
        rich_help_panel=ENGINE,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, and nothing else.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]


@dataclass(frozen=True)
class EngineOptions:
    """What decodes: engines in place of the bundle's graphs, and how they run."""

    threads: int | None = None
    engines: Path | None = None
    provider: list[str] | None = None

    def runs_on_cpu(self, bundle: Bundle) -> bool:
        """Whether ONNX Runtime runs the bundle's own graphs on the CPU; says so where `auto` is a GPU."""
        from ..engines.loader import choose_providers
        from .console import print_stderr

        if self.engines is not None:
            return False
        chosen = Providers.read(self.provider or ())
        main = choose_providers(chosen, bundle).main
        if main not in (DEFAULT_PROVIDER, chosen.main):
            print_stderr(f"running on the GPU, provider {main}; --provider cpu for the CPU")
        return main == DEFAULT_PROVIDER

    def open_bundle(self, name: str) -> Bundle:
        """Open a bundle without hashing the graphs that engines replace."""
        from ..engines.engine_folder import open_engine_folder

        return open_bundle(name, () if self.engines is None else open_engine_folder(self.engines).replaced())

    def load(self, bundle: Bundle, settings: Settings | None = None, prefix: int | None = None) -> Pipeline:
        """Load the bundle's graphs, or the engines in their place.

        Args:
            bundle: an opened bundle.
            settings: what is to be decoded with; None where that is several things.
            prefix: tokens of the longest prompt, if known.

        Raises:
            RequestError: there is too little memory; counted where ONNX Runtime runs on the CPU, not for GPUs.
        """
        from ..engines.engine_folder import open_engine_folder
        from ..memory import check_memory, largest_settings
        from ..pipeline import Pipeline
        from .console import show_progress

        engines = None if self.engines is None else open_engine_folder(self.engines)
        if self.runs_on_cpu(bundle):
            check_memory(bundle, settings or largest_settings(bundle.manifest), prefix)
        with show_progress(lines=False) as progress:
            progress("loading graphs")
            return Pipeline.from_bundle(bundle, threads=self.threads, engines=engines, provider=self.provider)


def open_bundle(name: str, skipped_roles: Collection[str] = ()) -> Bundle:
    """Open a bundle and show how far checking its files is; `skipped_roles` as in `bundle.files.open_bundle`."""
    from ..bundle import files
    from .console import show_progress

    with show_progress(lines=False) as progress:

        def report(done: int, total: int) -> None:
            progress("checking the bundle's files (MB)", -(-done // 10**6), -(-total // 10**6))

        return files.open_bundle(name, skipped_roles=skipped_roles, progress=report)
