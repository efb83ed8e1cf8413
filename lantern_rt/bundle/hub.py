"""The model hub: `hf:owner/name[/file][@revision]` instead of a path.

Everything goes through `huggingface_hub`, with its own cache, bars and settings (HF_ENDPOINT, HF_HOME, HF_TOKEN,
HF_HUB_OFFLINE). Nothing that is fetched is run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import BundleError, LanternError
from ..inputs import format_error

HUB = "hf:"  # what a reference begins with
PLAIN_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # of a file, which is no pattern and leads nowhere else
REPOSITORY = rf"{PLAIN_NAME}/{PLAIN_NAME}"
_PATH = rf"{PLAIN_NAME}(?:/{PLAIN_NAME})*"  # of a file or a revision
_REFERENCE = re.compile(rf"hf:({REPOSITORY})(?:/({_PATH}))?(?:@({_PATH}))?")


def parse_reference(text: str, refusal: type[LanternError]) -> tuple[str, str | None, str | None]:
    """Repository, file and revision of a reference. Raises: what `refusal` is: it is malformed."""
    match = _REFERENCE.fullmatch(text)
    if match is None:
        expected = "hf:owner/name, hf:owner/name/file, either with @revision, or a path on this machine"
        raise refusal(f"expected {expected}", field=text)
    return match[1], match[2], match[3]


def is_rejected(error: Exception) -> bool:
    """Whether the hub was reached and says no: a wrong name, terms that were not accepted, no token."""
    from huggingface_hub.errors import HfHubHTTPError

    response = error.response if isinstance(error, HfHubHTTPError) else None
    return response is not None and 400 <= response.status_code < 429


@contextmanager
def hub_errors(field: str, refusal: type[LanternError], remedy: str) -> Iterator[None]:
    """Any error of the library, or of its network client, becomes a `refusal`; `remedy` if the hub is out of reach."""
    try:
        yield
    except LanternError:
        raise
    except Exception as error:  # they share no base class
        problem = "the hub cannot be reached"
        if is_rejected(error):
            problem = "the hub refuses it"
            remedy = "check the name, accept the terms on its page, or run `hf auth login`"
        raise refusal(f"{problem} ({format_error(error)})", field=field, remedy=remedy) from error


def fetch_bundle(text: str, manifest: str, listed: Callable[[Path], Iterable[str]]) -> Path:
    """The folder of a bundle in the hub's cache, what is missing there fetched first; files are links into the cache.

    Args:
        text: a reference without a file.
        manifest: name of the file that lists the others, which are taken from the same commit.
        listed: the others, by the folder of that file.

    Raises:
        BundleError: a malformed reference, no such bundle, or it can neither be reached nor is in the cache.
    """
    repository, file, revision = parse_reference(text, BundleError)
    if file is not None:
        raise BundleError(field=text, found=f"the file {file}", expected="the name of a whole repository")
    from huggingface_hub import hf_hub_download

    with hub_errors(text, BundleError, f"try again, or download the files of {repository} and give their folder"):
        folder = Path(hf_hub_download(repository, manifest, revision=revision)).parent
        for name in listed(folder):
            hf_hub_download(repository, name, revision=folder.name)
    return folder
