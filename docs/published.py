"""Writes a section for every published model, from the table: `python docs/published.py docs/published.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from lantern_rt import published
from lantern_rt.cli.models import format_parameter_count
from lantern_rt.published import PublishedModel

HEAD = """# Published models, one by one

`docs/published.py` makes this page from `published.json`. [Models](models.md) has the models in a table, and says how
to export each family. Memory is for one image, estimated from sizes. We had no published weights, so no seconds were
measured.
"""
# Each family: subjects that it draws well by its training, and its limits.
FAMILIES = {
    "llamagen": (
        "It generates one object of ImageNet's classes in the middle of the image.",
        "It takes class ids, not prompts.",
    ),
    "text": (
        "It takes prompts like the captions of web images.",
        "Prompts are cut to 120 tokens. Most of the download is the text encoder.",
    ),
    "anole": ("It takes prompts of any subject.", "It is a fine-tuned Chameleon, whose weights are for research only."),
    "janus": ("It takes prompts of any subject.", "It has one image size."),
    "lumina": ("It takes prompts of any subject, and has many image shapes.", "An image has 2,304 tokens."),
    "lumina2": ("It takes prompts of any subject, and has many image shapes.", "An image has 9,216 tokens."),
    "glm_image": (
        "It takes prompts of any subject, and has many image shapes.",
        "It generates tokens, from which diffusers makes images as a second stage.",
    ),
    "emu3": ("It takes prompts of any subject, and has ten image shapes.", "An image has 8,100 tokens."),
    "emu35": (
        "It takes prompts of any subject, and has many image shapes.",
        "It needs the largest download and most memory.",
    ),
    "simplear": ("It takes prompts of any subject, and is a small download.", "An image has 4,096 tokens."),
}


def section(name: str, model: PublishedModel) -> str:
    """Return the section of a model."""
    takes_class = model.family == "llamagen" and "text_encoder" not in model.files
    family = "text" if "text_encoder" in model.files else model.family
    good, limits = FAMILIES[family]
    subject = "--class-id 207" if takes_class else '"a red fox in deep snow"'
    argument = "class_ids=207" if takes_class else '"a red fox in deep snow"'
    body = '{"class_id": 207}' if takes_class else '{"prompt": "a red fox in deep snow"}'
    image = f'pipe({argument}, seed=1).images[0].save("image.png")'
    finished = ", ".join(f"{key} {bundle.download_bytes / 1e9:.1f} GB" for key, bundle in model.bundles.items())
    lines = [
        f"## {name}",
        "",
        f"{good} {limits} Image sizes in pixels: {model.sizes}. "
        f"Parameters: {format_parameter_count(model.parameters)}.",
        "",
        f"- Download: {model.download_bytes / 1e9:.1f} GB{', with a login' if model.login else ''}; finished bundle: "
        f"{finished or 'none to download yet'}",
        f"- Memory: {model.memory_bytes / 1e9:.1f} GB in `int8`, {2 * model.memory_bytes / 1e9:.1f} GB in `fp16`",
        f"- Licence: {model.licence}",
        "",
        "```sh",
        f"lantern-rt run {name} {subject}",
        "```",
        "",
        "```python",
        "from lantern_rt import Pipeline",
        "",
        f'pipe = Pipeline.from_bundle("{name}", download=True)',
        image if model.makes_images else f"print(pipe({argument}, seed=1).codes)",
        "```",
        "",
    ]
    if model.makes_images:
        curl = f"curl localhost:8000/v1/images/generations -H 'content-type: application/json' -d '{body}'"
        lines += ["From a server:", "", f"    lantern-rt serve {name}", "", "```sh", curl, "```", ""]
    return "\n".join(lines)


def page() -> str:
    """Return the page."""
    return "\n".join([HEAD, *(section(name, model) for name, model in published.load_published_models().items())])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), "utf-8")
