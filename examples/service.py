"""Run a small HTTP service: `python examples/service.py`, then http://localhost:8000/?prompt=a+red+sphere+on+sand&seed=3

Threads share one pipeline. The service generates one image at a time, so that strangers cannot use up the host; other
requests wait. A request that takes longer than `MAX_SECONDS` is cancelled.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from urllib.parse import parse_qs, urlsplit

from lantern_rt import LanternError, Pipeline, RequestError

MAX_SECONDS = 30.0  # per request, with waiting


class ImageGenerator:
    """Generates one image at a time, each within a time limit."""

    def __init__(self, pipe: Pipeline) -> None:
        self.pipe = pipe
        self.lock = threading.Lock()

    def generate_png(self, prompt: str, seed: int, max_seconds: float = MAX_SECONDS) -> bytes:
        """Return the bytes of a PNG file.

        Raises:
            LanternError: the request is invalid, or the model cannot be run.
            TimeoutError: the image is not complete after `max_seconds`.
        """
        deadline = time.monotonic() + max_seconds
        steps = self.pipe.stream(prompt, seed=seed)  # raises RequestError at once, before the request waits
        if not self.lock.acquire(timeout=max_seconds):
            raise TimeoutError
        try:
            for step in steps:
                if step.stats is None and time.monotonic() > deadline:
                    raise TimeoutError
        finally:
            steps.close()  # ends generation
            self.lock.release()
        file = BytesIO()
        step.image(0).save(file, "PNG")
        return file.getvalue()


class Handler(BaseHTTPRequestHandler):
    """Responds to GET requests with a PNG, or with one line that describes the error."""

    def __init__(self, generator: ImageGenerator, *arguments: object) -> None:
        self.generator = generator
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Respond with an image of the query's `prompt` and `seed`."""
        query = {name: values[-1] for name, values in parse_qs(urlsplit(self.path).query).items()}
        try:
            seed = query.get("seed", "0")
            if not seed.isdecimal() or len(seed) > 18:
                raise RequestError(field="seed", found=repr(seed[:20]), expected="a number of at most 18 digits")
            self.send(200, "image/png", self.generator.generate_png(query.get("prompt", ""), int(seed)))
        except RequestError as error:
            self.send(400, "text/plain; charset=utf-8", f"{error}\n".encode())
        except TimeoutError:
            self.send(503, "text/plain; charset=utf-8", b"busy; try again later\n")
        except LanternError as error:
            logging.getLogger("service").error("%s", error)
            self.send(500, "text/plain; charset=utf-8", b"the model cannot be run\n")

    def send(self, status: int, content_type: str, body: bytes) -> None:
        """Send a complete response."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def make_server(pipe: Pipeline, port: int = 8000) -> ThreadingHTTPServer:
    """Return a server that listens on `port`; 0 selects any free port."""
    return ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, ImageGenerator(pipe)))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)  # shows messages of lantern-rt as well
    with Pipeline.from_bundle("scenes") as pipe:
        pipe.warm_up()
        make_server(pipe).serve_forever()
