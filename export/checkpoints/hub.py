"""Checkpoints by name from a model hub: `hf:owner/name[/file][@revision]` instead of a path.

Only what an exporter reads is fetched: a folder's configuration, tokenizer and weights in one format, or the one
file. The revision is resolved to a commit first, so that all files are of one state and the bundle can tell which.
Everything goes through `huggingface_hub`, with its own settings (HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE).
Nothing that is fetched is run: no repository code, and weights are read as any other file.

Does not know what the files hold.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ...errors import CheckpointError, EngineError, LanternError
from .folders import INDEX, SINGLE, choose_files, listing, read_index

SCHEME = "hf:"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REFERENCE = re.compile(
    rf"hf:(?P<repository>{_PART}/{_PART})(?:/(?P<file>{_PART}(?:/{_PART})*))?(?:@(?P<revision>.+))?"
)


@dataclass(frozen=True)
class Fetched:
    """A file or folder on this machine; `origin` is what was asked for with its commit, None for a plain path."""

    path: Path
    origin: str | None


@dataclass(frozen=True)
class Reference:
    """A repository, one file of it or what it holds as a whole, and a revision or None for the newest."""

    repository: str
    file: str | None
    revision: str | None

    @property
    def shown(self) -> str:
        """As the user wrote it, without the revision."""
        return f"{SCHEME}{self.repository}" + (f"/{self.file}" if self.file else "")


def parse_reference(text: str) -> Reference | None:
    """A reference, or None for a plain path; CheckpointError if it is a malformed reference."""
    if not text.startswith(SCHEME):
        return None
    if not (match := _REFERENCE.fullmatch(text)):
        raise CheckpointError(
            f"{text}: expected hf:owner/name, hf:owner/name/file, either with @revision, or a path on this machine"
        )
    return Reference(match["repository"], match["file"], match["revision"])


def fetch(place: Path | str, side_files: Sequence[str] = ("config.json",)) -> Fetched:
    """The file or folder that a path or reference names, fetched if need be; of a folder weights and `side_files`.

    Raises EngineError if `huggingface_hub` is not installed, CheckpointError if the repository, revision or a
    file is not there, or cannot be reached and is not in the cache; the message says what to download by hand.
    """
    reference = parse_reference(place.as_posix() if isinstance(place, Path) else place)
    if reference is None:
        return Fetched(Path(place), None)
    if importlib.util.find_spec("huggingface_hub") is None:
        raise EngineError(
            f"{place}: fetching needs huggingface_hub; run `pip install 'lantern-rt[export]'`, "
            f"{_by_hand(reference, side_files)}"
        )
    try:
        return _fetch(reference, side_files)
    except LanternError:
        raise
    except Exception as error:  # the library's errors and those of its network client share no base class
        if refusal := _refusal(reference, error):
            raise CheckpointError(f"{place}: {refusal}") from error
        if (cached := _cached(reference, side_files)) is not None:
            return cached
        brief = " ".join(str(error).split())[:120] or type(error).__name__
        raise CheckpointError(
            f"{place}: the hub cannot be reached ({brief}); try again, {_by_hand(reference, side_files)}"
        ) from error


def _fetch(reference: Reference, side_files: Sequence[str]) -> Fetched:
    from huggingface_hub import HfApi

    siblings = HfApi().model_info(reference.repository, revision=reference.revision).siblings or []
    files = {sibling.rfilename for sibling in siblings}
    first, *rest = _wanted(reference, files, side_files)
    folder = _download(reference, first, reference.revision)  # by the name asked for: the cache then knows it offline
    for name in rest:
        _download(reference, name, folder.name)
    for name in {first, *rest}.intersection(INDEX):
        for shard in read_index(folder / name):
            _download(reference, shard, folder.name)
    return _fetched(reference, folder)


def _wanted(reference: Reference, files: Collection[str], side_files: Sequence[str]) -> list[str]:
    """The files of a repository to fetch; the shards of an index are not among them."""
    if reference.file is not None:
        if reference.file not in files:
            raise CheckpointError(f"{reference.shown}: no such file; {reference.repository} has {listing(files)}")
        return [reference.file]
    chosen = choose_files({name for name in files if name in (*SINGLE, *INDEX)})
    if not chosen:
        raise CheckpointError(
            f"{reference.shown}: found no {SINGLE[0]} and nothing alike, but {listing(files)}; "
            f"name one file: {reference.shown}/FILE"
        )
    return [*chosen, *(name for name in side_files if name in files)]


def _download(reference: Reference, name: str, revision: str | None) -> Path:
    """Fetch one file, unless the cache has it; the folder of its commit."""
    from huggingface_hub import hf_hub_download

    return _snapshot(hf_hub_download(reference.repository, name, revision=revision), name)


def _snapshot(path: str, name: str) -> Path:
    return Path(path).parents[len(PurePosixPath(name).parts) - 1]


def _cached(reference: Reference, side_files: Sequence[str]) -> Fetched | None:
    """What an earlier call left on this machine; whether it is whole is seen when it is read."""
    from huggingface_hub import try_to_load_from_cache

    name = reference.file or side_files[0]
    path = try_to_load_from_cache(reference.repository, name, revision=reference.revision)
    return _fetched(reference, _snapshot(path, name)) if isinstance(path, str) else None


def _fetched(reference: Reference, folder: Path) -> Fetched:
    return Fetched(folder / (reference.file or ""), f"{reference.shown}@{folder.name}")


def _refusal(reference: Reference, error: Exception) -> str | None:
    """What the hub answered, as a cure; None if it did not answer."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return "its owner asks for an agreement; accept it on the repository's page and log in with `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return "no such repository, or a private one that needs `hf auth login`; check the name"
    if isinstance(error, RevisionNotFoundError):
        return f"the repository has no revision {reference.revision}; leave @ out for the newest"
    return None


def _by_hand(reference: Reference, side_files: Sequence[str]) -> str:
    if reference.file is not None:
        return f"or download {reference.file} of {reference.repository} by hand and give its path"
    return (
        f"or download {', '.join(side_files)} and the .safetensors files (if it has none, the .bin files) with their "
        f".index.json of {reference.repository} by hand into one folder, and give that folder"
    )
