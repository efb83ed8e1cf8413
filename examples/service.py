"""A small HTTP service: `python examples/service.py`, then http://localhost:8000/?prompt=a+red+sphere+on+sand&seed=3

Threads share one pipeline, each request decodes its own batch, and a request that takes too long is given up. Without
limits of its own a service would let strangers use as much of the host as they like: here one image is drawn at a time,
and others wait for their turn.
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

SECONDS = 30.0  # for one picture, its turn included


class Painter:
    """Draws one picture at a time, each until its deadline."""

    def __init__(self, pipe: Pipeline) -> None:
        self.pipe, self.turn = pipe, threading.Lock()

    def png(self, prompt: str, seed: int, seconds: float = SECONDS) -> bytes:
        """A PNG file. Raises: TimeoutError, LanternError."""
        deadline = time.monotonic() + seconds
        steps = self.pipe.stream(prompt, seed=seed)  # what is wrong with a request shows here, before it waits
        if not self.turn.acquire(timeout=seconds):
            raise TimeoutError
        try:
            for step in steps:
                if step.stats is None and time.monotonic() > deadline:
                    raise TimeoutError
        finally:
            steps.close()  # cancels what is left; nothing runs on
            self.turn.release()
        file = BytesIO()
        step.image(0).save(file, "PNG")
        return file.getvalue()


class Handler(BaseHTTPRequestHandler):
    """Answers GET requests with a PNG, or with the line that says what was wrong."""

    def __init__(self, painter: Painter, *arguments: object) -> None:
        self.painter = painter
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """One picture of `prompt`, with `seed`."""
        query = {name: values[-1] for name, values in parse_qs(urlsplit(self.path).query).items()}
        try:
            seed = query.get("seed", "0")
            if not seed.isdecimal() or len(seed) > 18:
                raise RequestError(field="seed", found=repr(seed[:20]), expected="a number of at most 18 digits")
            self.answer(200, "image/png", self.painter.png(query.get("prompt", ""), int(seed)))
        except RequestError as error:
            self.answer(400, "text/plain; charset=utf-8", f"{error}\n".encode())
        except TimeoutError:
            self.answer(503, "text/plain; charset=utf-8", b"busy; try again later\n")
        except LanternError as error:
            logging.getLogger("service").error("%s", error)
            self.answer(500, "text/plain; charset=utf-8", b"the model cannot be run\n")

    def answer(self, status: int, kind: str, body: bytes) -> None:
        """Send a whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def make_server(pipe: Pipeline, port: int = 8000) -> ThreadingHTTPServer:
    """A server that is ready to serve; port 0 takes any."""
    return ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, Painter(pipe)))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)  # shows what lantern-rt logs, too
    with Pipeline.from_bundle("scenes") as pipe:
        pipe.warm_up()
        make_server(pipe).serve_forever()
