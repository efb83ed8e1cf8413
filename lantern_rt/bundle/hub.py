"""Downloads from the model hub, by references `hf:owner/name[/file][@revision]`.

All access uses `huggingface_hub`, its cache, progress bars and settings (HF_ENDPOINT, HF_HOME, HF_TOKEN,
HF_HUB_OFFLINE). Downloaded code is never executed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import BundleError, LanternError
from ..inputs import format_error, reraise_interruption

HUB = "hf:"  # Prefix of a reference.
PLAIN_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # A file name without wildcards or separators.
REPOSITORY = rf"{PLAIN_NAME}/{PLAIN_NAME}"
_PATH = rf"{PLAIN_NAME}(?:/{PLAIN_NAME})*"  # A file path or a revision.
_REFERENCE = re.compile(rf"hf:({REPOSITORY})(?:/({_PATH}))?(?:@({_PATH}))?")


def parse_reference(text: str, error_class: type[LanternError]) -> tuple[str, str | None, str | None]:
    """Split a reference into repository, file and revision; raise `error_class` if it is malformed."""
    match = _REFERENCE.fullmatch(text)
    if match is None:
        expected = "hf:owner/name, hf:owner/name/file, either with @revision, or a path on this machine"
        raise error_class(field=text, expected=expected)
    return match[1], match[2], match[3]


def is_rejected(error: Exception) -> bool:
    """Return whether the hub rejected a request: the name is wrong, terms are not accepted, or there is no token."""
    from huggingface_hub.errors import HfHubHTTPError

    response = error.response if isinstance(error, HfHubHTTPError) else None
    return response is not None and 400 <= response.status_code < 429


@contextmanager
def hub_errors(field: str, error_class: type[LanternError], remedy: str) -> Iterator[None]:
    """Convert errors of `huggingface_hub` and of its network client.

    Args:
        field: field of the error.
        error_class: class of the error.
        remedy: remedy of the error if the hub cannot be reached.
    """
    try:
        yield
    except LanternError:
        raise
    except Exception as error:  # The exceptions share no base class.
        reraise_interruption(error)
        problem = "the hub cannot be reached"
        if is_rejected(error):
            problem = "rejected by the hub"
            remedy = "check the name, accept the terms on its page, or run `hf auth login`"
        raise error_class(f"{problem} ({format_error(error)})", field=field, remedy=remedy) from error


def fetch_bundle(text: str, manifest: str, list_files: Callable[[Path], Iterable[str]]) -> Path:
    """Download the files of a bundle that are not in the hub's cache.

    Args:
        text: reference without a file.
        manifest: name of the manifest file.
        list_files: function from the folder of the manifest to the names of all other files, which are downloaded
            from the same commit.

    Returns:
        The bundle's folder in the cache. Its files are links to other folders of the cache.

    Raises:
        BundleError: the reference is malformed, the bundle does not exist, or the hub cannot be reached.
    """
    repository, file, revision = parse_reference(text, BundleError)
    if file is not None:
        raise BundleError(field=text, found=f"the file {file}", expected="a reference without a file")
    from huggingface_hub import hf_hub_download

    with hub_errors(text, BundleError, f"try again, or download the files of {repository} and give their folder"):
        folder = Path(hf_hub_download(repository, manifest, revision=revision)).parent
        for name in list_files(folder):
            hf_hub_download(repository, name, revision=folder.name)
    return folder
