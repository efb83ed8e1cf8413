"""The model hub: `hf:owner/name[/file][@revision]` instead of a path, and bundles sent there.

Everything goes through `huggingface_hub`, with its own cache, bars and settings (HF_ENDPOINT, HF_HOME, HF_TOKEN,
HF_HUB_OFFLINE). Nothing that is fetched is run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import BundleError, LanternError, OutputError, RequestError
from ..inputs import brief, short

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REPOSITORY = rf"{_PART}/{_PART}"
_REFERENCE = re.compile(rf"hf:(?P<repository>{_REPOSITORY})(?:/(?P<file>{_PART}(?:/{_PART})*))?(?:@(?P<revision>.+))?")
HUB = "hf:"  # what a reference begins with


class Reference(NamedTuple):
    """What a reference names; no revision is the newest of the branch `main`."""

    repository: str
    file: str | None
    revision: str | None


def read_reference(text: str, refusal: type[LanternError]) -> Reference:
    """The parts of a reference. Raises: what `refusal` is: it is malformed."""
    match = _REFERENCE.fullmatch(text)
    if match is None:
        expected = "hf:owner/name, hf:owner/name/file, either with @revision, or a path on this machine"
        raise refusal(f"expected {expected}", field=text)
    return Reference(*match.group("repository", "file", "revision"))


def refused(error: Exception) -> bool:
    """Whether the hub was reached and says no: a wrong name, terms that were not accepted, no token."""
    from huggingface_hub.errors import HfHubHTTPError

    if not isinstance(error, HfHubHTTPError) or error.response is None:
        return False
    return 400 <= error.response.status_code < 429


def hub_error(error: Exception, field: str, kind: type[LanternError], remedy: str) -> LanternError:
    """What an error of the library, or of its network client, is to the user; `remedy` if the hub is out of reach."""
    if refused(error):
        remedy = "check the name, accept the terms on its page, or run `hf auth login`"
        return kind(f"the hub refuses it ({brief(error)})", field=field, remedy=remedy)
    return kind(f"the hub cannot be reached ({brief(error)})", field=field, remedy=remedy)


def fetch_bundle(text: str, manifest: str, listed: Callable[[Path], Iterable[str]]) -> Path:
    """The folder of a bundle in the hub's cache, what is missing there fetched first; files are links into the cache.

    Args:
        text: a reference without a file.
        manifest: name of the file that lists the others, which are taken from the same commit.
        listed: the others, by the folder of that file.

    Raises:
        BundleError: a malformed reference, no such bundle, or it can neither be reached nor is in the cache.
    """
    repository, file, revision = read_reference(text, BundleError)
    if file is not None:
        raise BundleError(field=text, found=f"the file {file}", expected="the name of a whole repository")
    from huggingface_hub import hf_hub_download

    try:
        folder = Path(hf_hub_download(repository, manifest, revision=revision)).parent
        for name in listed(folder):
            hf_hub_download(repository, name, revision=folder.name)
    except LanternError:
        raise
    except Exception as error:  # the library's errors and those of its network client share no base class
        remedy = f"try again, or download the files of {repository} by hand and give their folder"
        raise hub_error(error, text, BundleError, remedy) from error
    return folder


def make_repository(repository: str) -> None:
    """Make a repository of models, a private one, if there is none of this name, `owner/name`.

    Raises: OutputError: the hub refuses it, or cannot be reached.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(repository, private=True, exist_ok=True)
    except Exception as error:  # as above
        raise hub_error(error, repository, OutputError, "try again") from error


def push_files(repository: str, files: Mapping[str, Path | bytes], message: str) -> str:
    """Send files to a repository, all in one commit.

    Args:
        repository: `owner/name`.
        files: by their names there; those of other names stay as they are.
        message: of the commit.

    Returns:
        The reference of the commit.

    Raises:
        OutputError: the hub refuses them, or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    added = [CommitOperationAdd(name, content) for name, content in files.items()]
    try:
        commit = HfApi().create_commit(repository, added, commit_message=message)
    except Exception as error:  # as above
        raise hub_error(error, repository, OutputError, "try again: what has arrived is not sent twice") from error
    return f"{HUB}{repository}@{commit.oid}"


def check_repository(text: str) -> None:
    """Raises: RequestError: a text is no `owner/name`."""
    if re.fullmatch(_REPOSITORY, text) is None:
        raise RequestError(field="repository", found=short(text), expected="owner/name")
