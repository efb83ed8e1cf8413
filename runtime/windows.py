"""Size of the draft window of an exact method.

The window is smaller if several images share a forward pass, or if the target rejects many drafts. An exact method
samples the same tokens with every window size, so the size affects only the time. The size depends on counts and never
on a clock, so the same sequences take the same forward passes on every host.
"""

from __future__ import annotations

# Pairs (n, w): with up to n images in a forward pass, each image drafts at most w tokens. Measured, see
# benchmarks/NOTES.md.
MAX_WINDOWS = ((1, 128), (2, 7), (4, 3), (8, 2))
MAX_WINDOW_ABOVE = 1  # maximum window with more images than in `MAX_WINDOWS`; not measured
# Time that one more node adds to a forward pass, as a fraction of the time of a pass over one node. Measured: a float32
# pass over 8 nodes took 1.7 times as long as over one node on two AVX-512 cores. With AVX2 alone, an int8 node costs
# more than twice this fraction, so windows shrink later there than would be best.
NODE_COST = 0.1
MAX_BALANCE = 4.0  # number of forward passes that drafts must lose to halve the window, or save to double it


class AdaptiveWindow:
    """Draft window of one image, 1 .. `max_window` tokens, which follows the number of accepted drafts."""

    def __init__(self, max_window: int) -> None:
        self.max_window = max_window
        self._window = max_window
        # Number of forward passes that drafts saved since the window changed; negative if drafts cost more.
        self._balance = 0.0

    def choose_size(self, num_images: int) -> int:
        """Return how many tokens to draft in the next forward pass over `num_images` images."""
        widest = next((window for count, window in MAX_WINDOWS if num_images <= count), MAX_WINDOW_ABOVE)
        return min(self._window, widest)

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Update the window from the result of one forward pass.

        The window is halved when its drafts have cost much more time than they saved. It is doubled when they have
        saved much more time than they cost.
        """
        # An accepted token saves one forward pass; every drafted token costs `NODE_COST` of a pass.
        self._balance += num_accepted - NODE_COST * num_drafted
        window = self._window
        if self._balance <= -MAX_BALANCE:
            window = max(1, window // 2)
        elif self._balance >= MAX_BALANCE:
            window = min(self.max_window, 2 * window + 1)  # inverts `window // 2` also for an odd window
        self._balance = max(-MAX_BALANCE, min(MAX_BALANCE, self._balance)) if window == self._window else 0.0
        self._window = window
