"""Checkpoints by name from a model hub: `hf:owner/name[/file][@revision]` instead of a path.

Only what an exporter reads is fetched: a folder's configuration, tokenizer and weights in one format, or the one
file. The first file resolves the revision to a commit, which all others are of and the bundle records. Everything
goes through `huggingface_hub`, with its own settings (HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE). Nothing that
is fetched is run.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ...checks import brief
from ...engines.contracts import Progress
from ...errors import CheckpointError, EngineError, LanternError
from .files import listing
from .folders import INDEX, SINGLE, choose_files, read_index

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REFERENCE = re.compile(
    rf"hf:(?P<repository>{_PART}/{_PART})(?:/(?P<file>{_PART}(?:/{_PART})*))?(?:@(?P<revision>.+))?"
)


class Fetched(NamedTuple):
    """A file or folder on this machine; `origin` is what was asked for with its commit, None for a plain path."""

    path: Path
    origin: str | None


class Reference(NamedTuple):
    """A repository, one file of it or what it holds as a whole, and a revision or None for the newest."""

    repository: str
    file: str | None
    revision: str | None

    def __str__(self) -> str:
        return f"hf:{self.repository}" + (f"/{self.file}" if self.file else "")


def parse_reference(text: str) -> Reference | None:
    """A reference, or None for a plain path. Raises: CheckpointError if it is a malformed reference."""
    if not text.startswith("hf:"):
        return None
    if not (match := _REFERENCE.fullmatch(text)):
        raise CheckpointError(
            f"{text}: expected hf:owner/name, hf:owner/name/file, either with @revision, or a path on this machine"
        )
    return Reference(match["repository"], match["file"], match["revision"])


def fetch(
    place: Path | str,
    side_files: Sequence[str] = ("config.json",),
    progress: Progress = lambda what, done, total: None,
) -> Fetched:
    """The file or folder that a path or reference names, fetched if need be; of a folder weights and `side_files`.

    progress: told after every file how many bytes are fetched, of how many.
    Raises: EngineError without `huggingface_hub`; CheckpointError for what is not there, or can neither be reached
    nor is in the cache.
    """
    reference = parse_reference(place.as_posix() if isinstance(place, Path) else place)
    if reference is None:
        return Fetched(Path(place), None)
    if reference.file is not None:
        by_hand = f"download {reference.file} of {reference.repository} by hand and give its path"
    else:
        files = f"{', '.join(side_files)} and the .safetensors files (if it has none, the .bin files)"
        where = "by hand into one folder, and give that folder"
        by_hand = f"download {files} with their .index.json of {reference.repository} {where}"
    if importlib.util.find_spec("huggingface_hub") is None:
        cure = f"run `pip install 'lantern-rt[export]'`, or {by_hand}"
        raise EngineError(f"{place}: fetching needs huggingface_hub; {cure}")
    from huggingface_hub import try_to_load_from_cache

    try:
        folder = _fetch(reference, side_files, progress)
    except LanternError:
        raise
    except Exception as error:  # the library's errors and those of its network client share no base class
        if refusal := _refusal(reference, error):
            raise CheckpointError(f"{place}: {refusal}") from error
        name = reference.file or side_files[0]  # what an earlier call left; whether it is whole is seen when it is read
        cached = try_to_load_from_cache(reference.repository, name, revision=reference.revision)
        if not isinstance(cached, str):
            reason = f"the hub cannot be reached ({brief(error)}); try again, or {by_hand}"
            raise CheckpointError(f"{place}: {reason}") from error
        folder = _snapshot(cached, name)
    return Fetched(folder / (reference.file or ""), f"{reference}@{folder.name}")


def _fetch(reference: Reference, side_files: Sequence[str], progress: Progress) -> Path:
    """Fetch the files that the cache does not have; the folder of their commit."""
    from huggingface_hub import HfApi, hf_hub_download

    info = HfApi().model_info(reference.repository, revision=reference.revision, files_metadata=True)
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    first, *rest = _wanted(reference, sizes, side_files)
    what, done = f"fetching {reference}", sizes[first]
    progress(what, 0, done + sum(sizes[name] for name in rest))
    # By the name asked for: the cache then knows it offline.
    folder = _snapshot(hf_hub_download(reference.repository, first, revision=reference.revision), first)
    rest += read_index(folder / first) if first in INDEX else []
    total = done + sum(sizes.get(name, 0) for name in rest)
    for name in rest:
        progress(what, done, total)
        hf_hub_download(reference.repository, name, revision=folder.name)
        done += sizes.get(name, 0)
    progress(what, done, total)
    return folder


def _wanted(reference: Reference, files: Collection[str], side_files: Sequence[str]) -> list[str]:
    """The files of a repository to fetch, that of the weights first; the shards of an index are not among them."""
    if reference.file is not None:
        if reference.file not in files:
            raise CheckpointError(f"{reference}: no such file; {reference.repository} has {listing(files)}")
        return [reference.file]
    chosen = choose_files({name for name in files if name in (*SINGLE, *INDEX)})
    if not chosen:
        raise CheckpointError(
            f"{reference}: found no {SINGLE[0]} and nothing alike, but {listing(files)}; "
            f"name one file: {reference}/FILE"
        )
    return [*chosen, *(name for name in side_files if name in files)]


def _snapshot(path: str, name: str) -> Path:
    return Path(path).parents[len(PurePosixPath(name).parts) - 1]


def _refusal(reference: Reference, error: Exception) -> str | None:
    """What the hub answered, as a cure; None if it did not answer."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return "its owner asks for an agreement; accept it on the repository's page and log in with `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return "no such repository, or a private one that needs `hf auth login`; check the name"
    revision = f"the repository has no revision {reference.revision}; leave @ out for the newest"
    return revision if isinstance(error, RevisionNotFoundError) else None
