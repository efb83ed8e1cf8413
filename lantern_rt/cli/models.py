"""The `models` command: lists published models, and describes one of them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..output.tables import format_text_table
from ..published import PublishedModel, find_cached_bundle, find_published_model, load_published_models
from .console import print_json, print_table, print_text
from .options import JsonOption

EXAMPLES = """
lantern-rt models
lantern-rt models janus-pro-1b
lantern-rt models --json
"""
COLUMNS = {
    "name": "{name}",
    "sizes": "{sizes}",
    "parameters": "{parameters_text}",
    "download": "{download_gb:.1f} GB",
    "memory": "{memory_gb:.1f} GB",
    "licence": "{licence}{login_text}",
    "": "{cached_text}",
}
# What each family was trained for, and its limits. `llamagen-text` is LlamaGen with a text encoder.
FAMILIES = {
    "llamagen": "Generates one object of ImageNet's classes in the middle of the image. Takes class ids, not prompts.",
    "rar": "Generates an image of one of ImageNet's classes. Takes class ids, not prompts.",
    "llamagen-text": "Takes prompts like captions of web images, cut to 120 tokens. Most of the download is the text "
    "encoder.",
    "gear": "Takes prompts of any subject, cut to 300 tokens. Most of the memory is for the text encoder.",
    "anole": "Takes prompts of any subject. A fine-tuned Chameleon, whose weights are for research only.",
    "janus": "Takes prompts of any subject. Has one image size.",
    "lumina": "Takes prompts of any subject, and has many image shapes, of 2,304 tokens each.",
    "lumina2": "Takes prompts of any subject, and has many image shapes, of 9,216 tokens each.",
    "glm_image": "Takes prompts of any subject, and has many image shapes. Generates tokens, from which diffusers "
    "makes images as a second stage.",
    "emu3": "Takes prompts of any subject, and has ten image shapes, of 8,100 tokens each.",
    "emu35": "Takes prompts of any subject, and has many image shapes. Largest download, and needs most memory.",
    "simplear": "Takes prompts of any subject. A small download. An image has 4,096 tokens.",
    "prologue": "Generates an object of ImageNet's classes, after 16 tokens for its layout. Takes class ids.",
}


def models(
    name: Annotated[str | None, typer.Argument(help="Model to describe. [default: all]")] = None,
    json: JsonOption = False,
) -> None:
    """List the published models that `run`, `serve` and `export` take by name, or describe one with its commands.

    The memory is for one image, with int8 weights, estimated from sizes. If a model has a finished bundle, the bundle
    is downloaded in place of the checkpoint.
    """
    if name is not None and not json:
        _print_model(name, find_published_model(name))
        return
    rows = [_describe_model(each) for each in ([name] if name is not None else load_published_models())]
    if json:
        print_json(
            {"models": [{key: value for key, value in row.items() if not key.endswith("_text")} for row in rows]}
        )
    else:
        print_table(COLUMNS, rows)
        print_text("scenes is included, and needs no download")


def _describe_model(name: str) -> dict[str, Any]:
    """Return the fields of a model for JSON, and the texts of its table row in fields that end with `_text`."""
    model = find_published_model(name)
    places = [place for precision in ("fp16", "int8") if (place := find_cached_bundle(name, precision))]
    return {
        "name": name,
        **model.model_dump(),
        "repositories": model.repositories,
        "cached": [*map(str, places)],
        "parameters_text": format_parameter_count(model.parameters),
        "download_gb": model.download_bytes / 1e9,
        "memory_gb": model.memory_bytes / 1e9,
        "bundles_text": ", ".join(
            f"{key} {bundle.download_bytes / 1e9:.1f} GB" for key, bundle in model.bundles.items()
        ),
        "login_text": ", login" if model.login else "",
        "cached_text": "in the cache" if places else "",
    }


def _print_model(name: str, model: PublishedModel) -> None:
    row = _describe_model(name)
    facts = {
        "sizes": model.sizes,
        "parameters": row["parameters_text"],
        "download": f"{row['download_gb']:.1f} GB{row['login_text']}",
        "finished bundle": row["bundles_text"] or "none",
        "memory": f"{row['memory_gb']:.1f} GB in int8, {2 * row['memory_gb']:.1f} GB in fp16",
        "licence": model.licence,
        "in the cache": ", ".join(row["cached"]) or "no",
    }
    if model.classes:
        option, argument, field = "--class-id 207", "class_ids=207", '"class_id": 207'
    else:
        option, argument, field = *['"a red fox in deep snow"'] * 2, '"prompt": "a red fox in deep snow"'
    result = f"pipe({argument}, seed=1)"
    print_text(
        FAMILIES.get(model.family if model.classes else f"{model.family}-text") or FAMILIES[model.family],
        format_text_table([*facts.items()]),
        f"\nlantern-rt run {name} {option}\n",
        "from lantern_rt import Pipeline",
        f'pipe = Pipeline.from_bundle("{name}", download=True)',
        f'{result}.images[0].save("image.png")' if model.makes_images else f"print({result}.codes)",
    )
    if model.makes_images:
        address = "localhost:8000/v1/images/generations -H 'content-type: application/json'"
        print_text(f"\nlantern-rt serve {name}", f"curl {address} -d '{{{field}}}'")


def format_parameter_count(num_parameters: int) -> str:
    """Format a number of parameters as text, such as `111 M` or `7.0 B`."""
    return f"{num_parameters / 1e9:.1f} B" if num_parameters >= 1e9 else f"{num_parameters / 1e6:.0f} M"
