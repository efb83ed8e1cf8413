"""Downloads from the Hugging Face Hub, by references `hf:owner/name[/file][@revision]`.

All access uses `huggingface_hub`, its cache, progress bars and settings (HF_ENDPOINT, HF_HOME, HF_TOKEN,
HF_HUB_OFFLINE). Downloaded code is never executed. Responses of the hub cannot name files outside the cache.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from ..errors import BundleError, LanternError
from ..inputs import format_error, reraise_error_of_signal_handler
from . import DOWNLOAD_THREAD

HUB = "hf:"  # Prefix of a reference.
PLAIN_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # A file name without wildcards or separators.
REPOSITORY = rf"{PLAIN_NAME}/{PLAIN_NAME}"
PLAIN_PATH = rf"{PLAIN_NAME}(?:/{PLAIN_NAME})*"  # A file path or a revision.
_REFERENCE = re.compile(rf"hf:({REPOSITORY})(?:/({PLAIN_PATH}))?(?:@({PLAIN_PATH}))?")
# The folder of a commit in the hub's cache, whose files are links to other folders of the cache.
SNAPSHOT = r".*/models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})"
_DIGEST_HEADERS = ("ETag", "X-Linked-Etag", "X-Repo-Commit", "X-Xet-Hash")
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC)
_DIGEST = re.compile(r'(?:W/)?"?[0-9a-fA-F]+"?')


def parse_hub_reference(reference: str, error_class: type[LanternError]) -> tuple[str, str | None, str | None]:
    """Split `hf:owner/name/file@revision` into repository, file or None, and revision or None."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        expected = "hf:owner/name, hf:owner/name/file, either with @revision, or a path on this machine"
        raise error_class(field=reference, expected=expected)
    return match[1], match[2], match[3]


def is_hub_rejection(error: BaseException) -> bool:
    """Return whether the hub rejected a request: a wrong name, terms that were not accepted, or no access token."""
    response = getattr(_find_http_error(error), "response", None)
    return response is not None and 400 <= response.status_code < 429


def _find_http_error(error: BaseException) -> BaseException:
    from huggingface_hub.errors import HfHubHTTPError

    return error.__cause__ if isinstance(error.__cause__, HfHubHTTPError) else error


@contextmanager
def convert_hub_errors(field: str, error_class: type[LanternError], remedy: str) -> Iterator[None]:
    """Convert errors of `huggingface_hub` to errors about `field`; `remedy` is for a hub that cannot be reached."""
    try:
        yield
    except LanternError:
        raise
    except Exception as error:  # The exceptions share no base class.
        reraise_error_of_signal_handler(error)
        problem = "the hub cannot be reached"
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            problem = f"the hub's cache {find_hub_cache()} cannot be written"
            remedy = "set HF_HOME to a folder on a disk with space that you may write to"
        if is_hub_rejection(error):
            problem = "rejected by the hub"
            remedy = "check the name, accept the terms on its page, or run `hf auth login`"
        raise error_class(f"{problem} ({format_error(_find_http_error(error))})", field=field, remedy=remedy) from error


def download_files(repository: str, file_names: Iterable[str], revision: str | None, again: bool = False) -> Path:
    """Download files that are not in the hub's cache, or with `again` all, and return the folder of their commit there.

    All come from the commit of the first file. `revision` is a branch, tag or commit; None: the default branch.
    """
    from huggingface_hub import hf_hub_download

    _install_download_digest_check()
    for name in file_names:
        download = partial(hf_hub_download, repository, name, revision=revision, force_download=again)
        folder = Path(_run_interruptibly(download)).parents[name.count("/")]
        revision = folder.name
    return folder


def _run_interruptibly(function: Callable[[], str]) -> str:
    """Call a function in a thread and return its result; a signal ends the waiting, but not the call."""
    result: Future[str] = Future()

    def store_result() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # raised by `result`
            result.set_exception(error)

    thread = Thread(target=store_result, name=DOWNLOAD_THREAD, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(1)  # Without a time limit, signals would not end it on Windows.
    return result.result()


def _install_download_digest_check() -> None:
    """Make the network client of `huggingface_hub` drop invalid digests in response headers.

    The library names cache files by these digests, so an invalid digest could name a file outside the cache.
    """
    from huggingface_hub import get_session, set_client_factory
    from huggingface_hub.utils import _http

    if _drop_invalid_headers in get_session().event_hooks["response"]:
        return
    create_client = _http._GLOBAL_CLIENT_FACTORY  # A program may have set another; this has no public name.

    def create_digest_checking_client() -> Any:
        client = create_client()
        client.event_hooks["response"].append(_drop_invalid_headers)
        return client

    set_client_factory(create_digest_checking_client)


def _drop_invalid_headers(response: Any) -> None:
    for name in _DIGEST_HEADERS:
        if not _DIGEST.fullmatch(response.headers.get(name, "0")):
            del response.headers[name]


def list_allowed_link_targets(folder: Path) -> list[Path]:
    """Return the folders to which links in a bundle may point: its own and, in the hub's cache, those of files."""
    if not re.fullmatch(SNAPSHOT, folder.as_posix()):
        return [folder]
    repository = folder.parents[1]
    return [folder, repository / "blobs", repository.parent / "blobs"]  # Repositories may share the latter.


def find_hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def find_snapshot_folder(reference: str) -> Path:
    """Return the folder of `hf:owner/name@commit` in the hub's cache, even if it does not exist."""
    repository, _, commit = parse_hub_reference(reference, BundleError)
    return find_hub_cache() / f"models--{repository.replace('/', '--')}" / "snapshots" / (commit or "main")


def fetch_bundle_files(
    reference: str, file_names: Iterable[str], commit: str | None = None, again: bool = False
) -> Path:
    """Download the files of a bundle as `download_files` does, and return its folder, whose name is the commit.

    `commit` is that of the files; None: that of the reference.
    """
    repository, file, revision = parse_hub_reference(reference, BundleError)
    if file is not None:
        raise BundleError(field=reference, found=f"the file {file}", expected="a reference without a file")
    remedy = f"try again, or download the files of {repository} and give their folder"
    with convert_hub_errors(reference, BundleError, remedy):
        return download_files(repository, file_names, commit or revision, again)
