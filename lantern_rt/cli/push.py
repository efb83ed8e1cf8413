"""The `push` command: a bundle to the hub, with a model card made of what it says about itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bundle.files import MANIFEST_FILE, Bundle
from ..bundle.hub import HUB, REPOSITORY, hub_errors
from ..errors import OutputError, RequestError
from ..inputs import format_value, read_plain_file, reading
from ..output.recipe import CURE, read_recipe
from .console import print_stderr, print_text, show_progress
from .inspect import describe_bundle
from .options import BundleArgument, EngineOptions, open_bundle
from .replay import settings_of_recipe

EXAMPLES = """
lantern-rt push bundles/llamagen-b owner/llamagen-b
lantern-rt push bundles/text owner/text cat.png dog.png
"""
DRAWN, _COLUMNS = 4, 4  # pictures of a card without any given, and pictures side by side
_PICTURE_LIMIT = 1 << 26  # bytes
_LICENCES = ("apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "openrail", "llama2")


def push(
    bundle: BundleArgument,
    repository: Annotated[str, typer.Argument(help="owner/name on the hub; a new one is private.")],
    pictures: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PNG]...", help=f"Pictures of this bundle for its card. [default: {DRAWN} that are drawn now]"
        ),
    ] = None,
) -> None:
    """Send a bundle to the hub, with a model card: README.md and pictures.

    The token is that of `hf auth login`, or HF_TOKEN. What is there under other names stays.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    if re.fullmatch(REPOSITORY, repository) is None:
        raise RequestError(field="repository", found=format_value(repository), expected="owner/name")
    opened = open_bundle(bundle)
    samples = [_read_sample(path, opened) for path in pictures or ()]
    with hub_errors(repository, OutputError, "try again"):
        HfApi().create_repo(repository, private=True, exist_ok=True)  # before anything is drawn
    samples = samples or _draw_samples(opened)
    files: dict[str, Path | bytes] = {f"samples/{i}.png": content for i, (content, _) in enumerate(samples, 1)}
    for name in (MANIFEST_FILE, *(entry.path for entry in opened.manifest.files.values())):
        files[name] = opened.folder / name
    files["README.md"] = model_card(opened, repository, [texts for _, texts in samples]).encode()
    print_stderr(f"sending {len(files)} files")
    added = [CommitOperationAdd(name, content) for name, content in files.items()]
    with hub_errors(repository, OutputError, "try again: what has arrived is not sent twice"):
        commit = HfApi().create_commit(repository, added, commit_message=f"Bundle {opened.digest[:12]}")
    print_text(f"{HUB}{repository}@{commit.oid}")


def _read_sample(path: Path, bundle: Bundle) -> tuple[bytes, Mapping[Any, Any]]:
    recipe = read_recipe(path)
    settings_of_recipe(path, recipe, bundle)
    with reading(path, "a picture", RequestError, CURE):
        return read_plain_file(path, _PICTURE_LIMIT), recipe.model_dump(exclude_none=True)


def _draw_samples(bundle: Bundle) -> list[tuple[bytes, Mapping[Any, Any]]]:
    """As many pictures as there are prompts for. Raises: RequestError: the bundle has no prompts of its own."""
    from ..compare.prompts import read_bundle_prompts
    from ..output.images import png_bytes

    try:
        prompts = read_bundle_prompts(bundle, count=DRAWN)
    except RequestError as error:
        error.remedy = "draw pictures with `lantern-rt run`, and name them behind the repository"
        raise
    with EngineOptions().load(bundle) as pipeline, show_progress(lines=False) as progress:
        for step in pipeline.stream(**prompts.request(0, len(prompts.items), first_seed=0)):
            progress("drawing pictures for the card", step.done, step.total)
        images = [step.image(i) for i in range(len(prompts.items))]
    return [(png_bytes(image, image.info), image.info) for image in images]


def model_card(bundle: Bundle, repository: str, samples: Sequence[Mapping[Any, Any]]) -> str:
    """The README.md of a repository.

    Args:
        bundle: what is in it.
        repository: its name.
        samples: what each picture, `samples/1.png` and so on, records.
    """
    manifest = bundle.manifest
    made = manifest.provenance
    name, kind, licence = f"{HUB}{repository}", manifest.condition.kind, made.licence.lower()
    captions = [f"{one.get('prompt', 'class {}'.format(one.get('class_id')))}, seed {one['seed']}" for one in samples]
    subject = f"--class-id {samples[0].get('class_id')}" if kind == "class" else '"what to draw"'
    subject = "--embeddings FILE.npz" if kind == "embeddings" else subject
    lines = [
        "---",
        "library_name: lantern-rt",
        f"pipeline_tag: {'unconditional-image-generation' if kind == 'class' else 'text-to-image'}",
        f"license: {licence if licence in _LICENCES else 'other'}",
        "---",
        f"# {_text(manifest.name)}",
        "",
        f"A bundle of lantern-rt: {_text(manifest.family)} on ONNX Runtime.",
        "",
    ]
    for start in range(0, len(captions), _COLUMNS):
        numbers = range(start, min(start + _COLUMNS, len(captions)))
        lines += _table([[f"![](samples/{i + 1}.png)" for i in numbers], [captions[i] for i in numbers]])
    lines += [
        "Every picture records how it was drawn: `--from` draws it again.",
        "",
        f'    pip install "lantern-rt[cpu]"\n    lantern-rt run {name} {subject}',
        f"    lantern-rt run {name} --from 1.png\n    lantern-rt serve {name}",
        "",
    ]
    for section, facts in describe_bundle(bundle).items():
        rows = [[fact, value] for fact, value in facts.items() if fact != "folder"]
        lines += [f"## {_text(section)}", "", *_table([["field", "value"], *rows])] if rows else []
    files = [[one.role, one.name, one.sha256, one.origin or ""] for one in made.sources]
    lines += ["## made from", "", *_table([["role", "file", "sha256", "from"], *files])] if files else []
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *others = (f"| {' | '.join(map(_text, row))} |" for row in rows)
    return [head, "|---" * len(rows[0]) + "|", *others, ""]


def _text(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
