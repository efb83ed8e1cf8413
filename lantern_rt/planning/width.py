"""How many images should share passes: as many as are there, unless fewer together give more tokens a second.

More images in a pass share the reading of the weights; past some number a processor has nothing left to gain, and
larger passes fall out of its caches. Where that is, is measured while serving: tokens and seconds of passes, by how
many images shared them, the next power of two counting. A width is left for one that is known to give clearly more; its
double and its half are tried.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 8  # images together while nothing is known
ENOUGH = 2.0  # seconds of passes that say what a width gives
MEMORY = 10.0  # seconds that are remembered
STALE = 600.0  # seconds of passes after which what another width gave is asked again
CLEARLY = 1.05


@dataclass
class _Passes:
    """Tokens and seconds of passes, older ones counting less."""

    tokens: float = 0.0
    seconds: float = 0.0
    at: float = 0.0  # of all seconds, when the last of them was

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        if self.seconds > MEMORY:
            self.tokens, self.seconds = self.tokens * MEMORY / self.seconds, MEMORY


class Width:
    """The number of images that may share passes, 1 .. most: the best one known, or a neighbour that is being tried."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.images = self._best = min(FIRST, most)
        self._passes: dict[int, _Passes] = {}
        self._seconds = 0.0  # of all passes

    def record(self, images: int, tokens: int, seconds: float) -> None:
        """A pass that so many images shared, the tokens it gave them together, and what it took."""
        width = bucket(images, self.most)
        self._seconds += seconds
        self._passes = {one: known for one, known in self._passes.items() if self._seconds - known.at < STALE}
        own = self._passes.setdefault(width, _Passes())
        own.add(tokens, seconds)
        own.at = self._seconds
        known = {width: passes.rate for width, passes in self._passes.items() if passes.seconds >= ENOUGH}
        if width != self.images or width not in known or self._best not in known:
            return
        fastest = max(known, key=lambda width: known[width])
        if known[fastest] > CLEARLY * known[self._best]:
            self._best = fastest
        neighbours = bucket(2 * self._best, self.most), bucket(max(1, self._best // 2), self.most)
        self.images = next((one for one in neighbours if one not in known), self._best)


def bucket(images: int, most: int) -> int:
    """Numbers of images that are told apart: powers of two, and the most."""
    return min(most, 1 << (images - 1).bit_length())
