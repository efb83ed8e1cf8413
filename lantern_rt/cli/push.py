"""The `push` command: uploads a bundle to the Hugging Face Hub with a generated model card."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bundle.files import MANIFEST_FILE, Bundle
from ..bundle.hub import HUB, PLAIN_PATH, REPOSITORY, convert_hub_errors
from ..errors import BundleError, OutputError, RequestError
from ..inputs import convert_read_errors, format_value, read_regular_file
from ..output.formats import PNG
from ..output.recipe import REMEDY, read_recipe
from .console import print_stderr, print_text, show_progress
from .inspect import describe_bundle
from .options import BundleArgument, EngineOptions, open_named_bundle
from .replay import restore_recorded_settings

EXAMPLES = """
lantern-rt push bundles/llamagen-b owner/llamagen-b
lantern-rt push bundles/text owner/text cat.png dog.png
"""
NUM_SAMPLES = 4  # images that are generated for a card if none are given
_COLUMNS = 4  # images per row of the card
_MAX_IMAGE_BYTES = 1 << 26
_LICENCES = ("apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "openrail", "llama2")


def push(
    bundle: BundleArgument,
    repository: Annotated[str, typer.Argument(help="Repository owner/name on the hub; a new one is private.")],
    images: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PNG]...",
            help=f"Images of this bundle for the card. [default: {NUM_SAMPLES} that are generated now]",
        ),
    ] = None,
) -> None:
    """Upload a bundle to the Hugging Face Hub, with a model card: README.md and images.

    Uses the token of `hf auth login` or HF_TOKEN. Other files in the repository stay.
    """
    if re.fullmatch(REPOSITORY, repository) is None:
        raise RequestError(field="repository", found=format_value(repository), expected="owner/name")
    opened = open_named_bundle(bundle)
    for entry in opened.manifest.files.values():
        # The hub rejects `.git`, and the model card would replace its files.
        if re.fullmatch(PLAIN_PATH, entry.path) is None or re.match(r"README\.md$|samples/", entry.path, re.IGNORECASE):
            expected = "a name of letters, digits and ._- that is not of the model card: README.md, samples/"
            field = f"{opened.folder / MANIFEST_FILE}: file"
            raise BundleError(field=field, found=format_value(entry.path), expected=expected)
    if images:
        opened.check_has_image_decoder()
    samples = [_read_sample_image(path, opened) for path in images or ()]
    create_repository(repository, private=True)  # before images are generated
    if PNG.supports(opened.manifest):
        samples = samples or _generate_sample_images(opened)
    print_text(push_bundle(opened, repository, samples))


def create_repository(repository: str, private: bool) -> None:
    """Create a repository on the hub unless the repository exists."""
    from huggingface_hub import HfApi

    with convert_hub_errors(repository, OutputError, "try again"):
        HfApi().create_repo(repository, private=private, exist_ok=True)


def push_bundle(
    bundle: Bundle,
    repository: str,
    sample_images: Sequence[tuple[bytes, Mapping[Any, Any]]],
    card_notes: Sequence[str] = (),
) -> str:
    """Upload a bundle with its model card to a repository that exists; return the hub reference of this upload.

    A sample image is a PNG file with the settings that generated it.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    files: dict[str, Path | bytes] = {f"samples/{i}.png": content for i, (content, _) in enumerate(sample_images, 1)}
    for name in (MANIFEST_FILE, *(entry.path for entry in bundle.manifest.files.values())):
        files[name] = bundle.folder / name
    files["README.md"] = make_model_card(bundle, repository, [texts for _, texts in sample_images], card_notes).encode()
    print_stderr(f"uploading {len(files)} files")
    additions = [CommitOperationAdd(name, content) for name, content in files.items()]
    with convert_hub_errors(repository, OutputError, "try again; uploaded files are not sent twice"):
        commit = HfApi().create_commit(repository, additions, commit_message=f"Bundle {bundle.digest[:12]}")
    return f"{HUB}{repository}@{commit.oid}"


def _read_sample_image(path: Path, bundle: Bundle) -> tuple[bytes, Mapping[Any, Any]]:
    """Read a PNG file of the bundle, and return its contents and the settings that it records."""
    recipe = read_recipe(path)
    restore_recorded_settings(path, recipe, bundle)
    with convert_read_errors(path, "an image", RequestError, REMEDY):
        return read_regular_file(path, _MAX_IMAGE_BYTES), recipe.model_dump(exclude_none=True)


def _generate_sample_images(bundle: Bundle) -> list[tuple[bytes, Mapping[Any, Any]]]:
    """Generate images of the example prompts; return each PNG file, and the settings that generated it."""
    from ..compare.prompts import read_bundle_prompts

    try:
        prompts = read_bundle_prompts(bundle, count=NUM_SAMPLES)
    except RequestError as error:
        error.remedy = "generate images with `lantern-rt run`, and give them as arguments after the repository"
        raise
    with EngineOptions().load_pipeline(bundle) as pipeline, show_progress(announce_tasks=False) as progress:
        for step in pipeline.stream(**prompts.request(0, len(prompts.items), first_seed=0)):
            progress("generating images for the card", step.done, step.total)
        images = [step.image(i) for i in range(len(prompts.items))]
    return [(PNG.encode_image(image), image.info) for image in images]


def make_model_card(
    bundle: Bundle, repository: str, sample_recipes: Sequence[Mapping[Any, Any]], card_notes: Sequence[str] = ()
) -> str:
    """Create the README.md of a repository, whose images `samples/1.png` and so on have the settings `sample_recipes`.

    The value of `codes` is the SHA-256 of an image's tokens.
    """
    manifest = bundle.manifest
    provenance = manifest.provenance
    name = f"{HUB}{repository}"
    kind = manifest.condition.kind
    licence = provenance.licence.lower()
    captions = [
        f"{sample.get('prompt', 'class {}'.format(sample.get('class_id')))}, seed {sample['seed']}"
        + (f", {sample['method']}, codes {sample['codes']}" if "codes" in sample else "")
        for sample in sample_recipes
    ]
    subjects = {"class": "--class-id 0", "embeddings": "--embeddings FILE.npz"}
    subject = subjects.get(kind, '"a prompt"')
    lines = [
        "---",
        "library_name: lantern-rt",
        f"pipeline_tag: {'unconditional-image-generation' if kind == 'class' else 'text-to-image'}",
        f"license: {licence if licence in _LICENCES else 'other'}",
        "---",
        f"# {_escape_markdown_cell(manifest.name)}",
        "",
        f"A bundle of lantern-rt: {_escape_markdown_cell(manifest.family)} on ONNX Runtime.",
        "",
    ]
    for note in card_notes:
        lines += [_escape_markdown_cell(note), ""]
    for start in range(0, len(captions), _COLUMNS):
        numbers = range(start, min(start + _COLUMNS, len(captions)))
        lines += _format_markdown_table(
            [[f"![](samples/{i + 1}.png)" for i in numbers], [captions[i] for i in numbers]]
        )
    again = ""
    if PNG.supports(manifest):
        lines += ["Every image records its prompt, seed and settings: `--from` generates it again.", ""]
        again = f"\n    lantern-rt run {name} --from 1.png"
    else:
        lines += ["It generates codes, from which another program makes images.", ""]
    addresses = dict(line.split(", ") for line in metadata("lantern-rt").get_all("Project-URL") or ())
    lines += [
        f"With [lantern-rt]({addresses['Source']}) and its extra `cpu`:",
        "",
        f"    lantern-rt run {name} {subject}{again}",
        f"    lantern-rt serve {name}",
        "",
    ]
    for section, facts in describe_bundle(bundle).items():
        rows = [[fact, value] for fact, value in facts.items() if fact != "folder"]
        lines += (
            [f"## {_escape_markdown_cell(section)}", "", *_format_markdown_table([["field", "value"], *rows])]
            if rows
            else []
        )
    files = [[source.role, source.name, source.sha256, source.origin or ""] for source in provenance.sources]
    lines += ["## sources", "", *_format_markdown_table([["role", "file", "sha256", "from"], *files])] if files else []
    return "\n".join(lines)


def _format_markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *others = (f"| {' | '.join(map(_escape_markdown_cell, row))} |" for row in rows)
    return [head, "|---" * len(rows[0]) + "|", *others, ""]


def _escape_markdown_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
