"""Log of the server, which has one line for each HTTP request."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from ipaddress import IPv6Address, ip_address
from typing import Any

from ..errors import escape_unprintable

FORMATS = ("json", "text")
LEVELS = ("info", "warning", "error")
_LOG = logging.getLogger(__name__)


@dataclass
class RequestRecord:
    """Record of one HTTP request, for the log and the metrics."""

    request_id: str
    client: str
    path: str
    status: int = 500  # until a response begins
    key_name: str = ""  # empty if the server needs no key
    model: str = ""  # empty until the model is known
    log_fields: dict[str, Any] = field(default_factory=dict)  # further fields of the line
    start_time: float = field(default_factory=time.perf_counter)

    @property
    def caller(self) -> str:
        """API key, or address of the client. The addresses of an IPv6 /64 network are one caller."""
        if self.key_name:
            return self.key_name
        with suppress(ValueError):  # a Unix socket has no address
            address = ip_address(self.client)
            if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
                return f"{int(address) >> 64:x}::/64"
        return self.client

    def write_to_log(self) -> None:
        """Write a line about the request to the log, without the prompt."""
        line = {
            "request_id": self.request_id,
            "client": self.client,
            "key": self.key_name,
            "path": self.path,
            "status": self.status,
            "model": self.model,
            "seconds": round(time.perf_counter() - self.start_time, 4),
        }
        _LOG.info("request", extra={"facts": line | self.log_fields})


class LogFormatter(logging.Formatter):
    """Log formatter that writes one line per record, with the fields in `record.facts`."""

    def __init__(self, log_format: str = "json") -> None:
        super().__init__()
        self._log_format = log_format

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        level = record.levelname.lower()
        message = record.getMessage()
        facts: dict[str, Any] = getattr(record, "facts", {})
        traceback = self.formatException(record.exc_info) if record.exc_info else ""
        if self._log_format == "json":
            line = {"time": moment, "level": level, "message": message, **facts}
            return json.dumps(line | ({"traceback": traceback} if traceback else {}))
        values = [f"{name}={_quote(str(value))}" for name, value in facts.items() if value != ""]
        text = " ".join([moment, level, message, *values]).replace("\n", " ")
        return escape_unprintable(text) + (f"\n{traceback}" if traceback else "")


def _quote(text: str) -> str:
    """Quote a value that would not be read as one field."""
    return text if re.fullmatch(r'[^\s"=]+', text) else json.dumps(text, ensure_ascii=False)


@contextmanager
def log_to_stderr(level: str, log_format: str) -> Iterator[None]:
    """Print the server's log, and the warnings of all libraries, to stderr while the `with` block runs."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(log_format))
    handler.setLevel(level.upper())
    package = logging.getLogger(__name__.partition(".")[0])
    replaced = package.handlers[:]  # they print warnings as plain text
    logging.getLogger(__package__).setLevel(logging.INFO)
    logging.captureWarnings(True)
    logging.getLogger().addHandler(handler)
    package.handlers[:] = []
    try:
        yield
    finally:
        package.handlers[:] = replaced
        logging.getLogger().removeHandler(handler)
        logging.captureWarnings(False)
