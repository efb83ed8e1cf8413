"""The `doctor` command: a report about this host and its problems."""

from __future__ import annotations

import typer

from .. import __version__
from ..bundle.files import list_embedded_bundle_names
from ..engines.doctor import make_host_report
from ..output.tables import format_text_table
from .console import print_text

EXAMPLES = """
lantern-rt doctor
"""


def doctor() -> None:
    """Print versions, backends and hardware of this host, and problems.

    The line `will use` names the backend and the number of threads for generating images. The exit code is 2 if there
    are problems.
    """
    report = make_host_report()
    facts = {
        "lantern-rt": __version__,
        **report.facts,
        "bundles": ", ".join(list_embedded_bundle_names()) or "none embedded",
    }
    print_text(format_text_table([*facts.items(), *(("problem", problem) for problem in report.problems)]))
    if report.problems:
        raise typer.Exit(2)
