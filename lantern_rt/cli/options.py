"""Options that several commands of `lantern-rt` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, and nothing else.")]
Threads = Annotated[int | None, typer.Option(help="Threads of the engine. [default: one per core]")]
Engines = Annotated[
    Path | None, typer.Option(help="Folder made by build-engine from this bundle, to run instead of its graphs.")
]
Provider = Annotated[str, typer.Option(help="What ONNX Runtime runs on: cpu, cuda, openvino, coreml or directml.")]
CudaGraphs = Annotated[
    bool,
    typer.Option("--cuda-graphs", help="With TensorRT engines: record passes that recur, launch each as a whole."),
]
WeightBudget = Annotated[
    int | None,
    typer.Option(
        "--weight-budget",
        help="With TensorRT engines built with --weight-streaming: MiB of the target's weights that stay on the GPU. "
        "[default: all]",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
