"""The size of an exact window: smaller where images share a forward pass, and where drafts are rejected.

An exact method samples the same tokens under any window, so a window decides the time of an image and nothing else.
It follows from counts alone and never from a clock: the same sequences take the same forward passes on every host.
"""

from __future__ import annotations

# Images that share a forward pass, up to a number, and the widest window of each; measured (docs/measurements.md).
MAX_WINDOWS = ((1, 128), (2, 7), (4, 3), (8, 2))
MAX_WINDOW_ABOVE = 1  # the widest window of each of more images, not measured
# Time of a further node of a forward pass, in passes of one node: 8 nodes took 1.7 in float32 on two AVX-512 cores.
# With AVX2 alone nodes of int8 cost more than twice that, so windows narrow later there than would pay.
NODE_COST = 0.1
MAX_BALANCE = 4.0  # forward passes that drafts lose before a window is halved, or save before it is doubled


class AdaptiveWindow:
    """The window of one image.

    Args:
        max_window: tokens to draft at most, from 1.
    """

    def __init__(self, max_window: int) -> None:
        self.max_window = max_window
        self._window = max_window
        self._balance = 0.0  # forward passes that drafts saved since the window changed

    def choose_size(self, num_images: int) -> int:
        """Return how many tokens to draft in the next forward pass.

        Args:
            num_images: number of images that share the pass, from 1.
        """
        widest = next((window for count, window in MAX_WINDOWS if num_images <= count), MAX_WINDOW_ABOVE)
        return min(self._window, widest)

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Halve the window once its drafts have cost more time than they saved, double it once they have paid.

        Args:
            num_drafted: number of tokens drafted in a forward pass.
            num_accepted: number of them that were accepted.
        """
        self._balance += num_accepted - NODE_COST * num_drafted
        window = self._window
        if self._balance <= -MAX_BALANCE:
            window = max(1, window // 2)
        elif self._balance >= MAX_BALANCE:
            window = min(self.max_window, 2 * window + 1)
        self._balance = max(-MAX_BALANCE, min(MAX_BALANCE, self._balance)) if window == self._window else 0.0
        self._window = window
