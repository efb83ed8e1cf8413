"""The `inspect` command: checks and describes a bundle or an engine folder."""

from __future__ import annotations

from typing import Annotated

import typer

from ..bundle.files import Bundle, list_embedded_bundle_names
from ..engines.engine_folder import EngineFolder, is_engine_folder, open_engine_folder
from ..errors import RequestError
from .console import Facts, print_json, print_sections, print_text, show_progress
from .options import JsonOption, open_named_bundle

EXAMPLES = """
lantern-rt inspect scenes
lantern-rt inspect scenes --words
lantern-rt inspect bundles/llamagen-b --json
lantern-rt inspect engines/llamagen-xl
"""


def inspect(
    bundle: Annotated[
        str,
        typer.Argument(help="Bundle folder, name of an embedded bundle, hf:owner/name[@revision], or engine folder."),
    ] = "scenes",
    words: Annotated[
        bool, typer.Option("--words", help="Only print the words that prompts may contain, one per line.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Check the files of a bundle or an engine folder, and describe it.

    With --json, print the whole manifest of the bundle or engine folder.
    """
    if bundle not in list_embedded_bundle_names() and is_engine_folder(bundle):
        engines = open_engine_folder(bundle)
        with show_progress(announce_tasks=False) as progress:
            progress("checking the engine files")
            engines.check_files()
        if json:
            print_json({"folder": str(engines.folder), "manifest": engines.manifest.model_dump(mode="json")})
        else:
            print_sections({"engines": describe_engines(engines)})
        return
    opened = open_named_bundle(bundle)
    if words:
        _print_prompt_words(opened)
    elif json:
        size = sum(entry.bytes for entry in opened.manifest.files.values())
        head = {"folder": str(opened.folder), "digest": opened.digest, "bytes": size}
        print_json({**head, "manifest": opened.manifest.model_dump(mode="json")})
    else:
        print_sections(describe_bundle(opened))


def _print_prompt_words(bundle: Bundle) -> None:
    from ..text.words import read_word_tokenizer

    kind = bundle.manifest.condition.kind
    if kind != "words":
        raise RequestError(field="words", found=f"a bundle that takes {kind}", expected="a bundle with a word list")
    print_text(*read_word_tokenizer(bundle.path("tokenizer")).words)


def describe_bundle(bundle: Bundle) -> Facts:
    manifest = bundle.manifest
    classes = manifest.condition.classes
    sampling = {name: str(value) for name, value in manifest.sampling.model_dump(exclude_none=True).items()}
    sizes = ", ".join(size.name for size in manifest.sizes) or manifest.size().name
    presets: dict[str, str] = {name: str(preset.method) for name, preset in manifest.presets.items()}
    measured: dict[str, str] = {
        name: f"{preset.figures.tokens_per_pass:.2f} tokens per pass, {preset.figures.excess_nll:+.3f} nats per token, "
        f"{preset.figures.images} images, {preset.figures.date}"
        for name, preset in manifest.presets.items()
        if preset.figures
    }
    sources: dict[str, list[str]] = {}
    for source in manifest.provenance.sources:
        sources.setdefault(source.role, []).append(source.origin or source.name)
    return {
        manifest.name: {
            "family": manifest.family,
            "takes": manifest.condition.kind if classes is None else f"class ids 0 .. {classes - 1}",
            "images": sizes,
            **({} if manifest.source is None else {"source image": "`run --image`, without a mask"}),
            **({} if manifest.makes_images else {"image decoder": "none: `run` writes tokens"}),
            "tokens": f"{manifest.codes_per_image:,} per image, of {manifest.codebook_size:,}",
            **({} if manifest.order is None else {"order": f"{len(manifest.order.groups):,} groups, one per pass"}),
            "size": f"{sum(entry.bytes for entry in manifest.files.values()) / 1e6:,.1f} MB",
            "licence": manifest.provenance.licence,
            "exporter": manifest.provenance.exporter,
            "folder": str(bundle.folder),
            "digest": bundle.digest,
        },
        "decoders": {
            name: f"{spec.num_layers} layers of width {spec.hidden_size:,}, {spec.precision}"
            for name, spec in manifest.decoders.items()
        }
        | ({"heads": f"rank {heads.rank}, {heads.units} units"} if (heads := manifest.heads) else {}),
        "presets": presets,
        "measured": measured,
        "sampling": sampling,
        "sources": {
            role: first if not others else f"{first} and {len(others)} more"
            for role, (first, *others) in sources.items()
        },
    }


def describe_engines(engines: EngineFolder) -> dict[str, str]:
    manifest = engines.manifest.model_dump(mode="json", exclude={"graphs", "command"}, exclude_none=True)
    plain = {name: str(value) for name, value in manifest.items() if not isinstance(value, dict)}
    graphs = {role: f"{graph.bytes:,} bytes" for role, graph in engines.manifest.graphs.items()}
    return {"folder": str(engines.folder), **plain, **graphs, "rebuild": engines.rebuild_command}
