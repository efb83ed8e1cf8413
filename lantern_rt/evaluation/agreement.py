"""How well pictures show their prompts, by a user's ONNX graph such as both encoders of CLIP.

Does not know the model that drew the pictures, nor what the numbers mean to the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL.Image import Image

from ..errors import RequestError
from .picture_graph import PictureGraph, Preprocessing
from .prompt_tokens import Tokenize, Tokens
from .statistics import Floats

_EXPECTED = "one float [n, 3, h, w] and one int64 [n, length], or two with an attention mask"


class Agreement(Protocol):
    """Compares pictures with prompts. name: of the graph, file and sha256: its own, tokenizer: where ids come from."""

    name: str
    file: str
    sha256: str
    tokenizer: str

    def __call__(self, pictures: Sequence[Image], prompts: Sequence[str]) -> Floats:
        """A number for every picture and its prompt `[pictures]`, more where they agree."""
        ...


class GraphAgreement:
    """Agreement by an ONNX graph with a float input `[n, 3, height, width]` and an int64 input `[n, length]` of token
    ids, and maybe another of an attention mask.

    Its first output is taken: `[n]` or `[n, 1]`, or `[n, n]` of every picture with every prompt, whose diagonal is
    meant. `tokens` makes a tokenizer for as many ids as the graph takes, None where it leaves that open: then prompts
    of different length are not run together, so that none is padded. RequestError if the file is no such graph.
    """

    def __init__(
        self,
        path: Path,
        prepare: Preprocessing,
        tokens: Callable[[int | None], Tokenize],
        tokenizer: str,
        threads: int | None = None,
    ) -> None:
        self.graph = PictureGraph(path, prepare, "agreement", threads)
        self.name, self.file, self.sha256, self.tokenizer = path.stem, path.name, self.graph.sha256, tokenizer
        texts = self.graph.others
        if len(texts) not in (1, 2) or not all(_takes_tokens(tensor) for tensor in texts):
            self.graph.refuse_inputs(_EXPECTED)
        if "mask" in texts[0].name:
            texts = texts[::-1]
        self.names = [tensor.name for tensor in texts]  # ids, and maybe the mask
        length = texts[0].shape[1]
        self.tokenize = tokens(length if isinstance(length, int) else None)

    def __call__(self, pictures: Sequence[Image], prompts: Sequence[str]) -> Floats:
        """Agreement float64 `[pictures]`."""
        found = np.zeros(len(pictures))
        tokens = [self.tokenize(prompt) for prompt in prompts]
        lengths = np.array([len(ids) for ids, _ in tokens])
        for length in np.unique(lengths):
            alike = np.flatnonzero(lengths == length)
            for start in range(0, len(alike), self.graph.batch):
                chosen = alike[start : start + self.graph.batch]
                found[chosen] = self._run([pictures[i] for i in chosen], [tokens[i] for i in chosen])
        return found

    def _run(self, pictures: Sequence[Image], tokens: Sequence[Tokens]) -> Floats:
        texts = (np.stack(part) for part in zip(*tokens, strict=True))
        values = self.graph.run(pictures, dict(zip(self.names, texts, strict=False)))
        count = self.graph.fixed or len(pictures)
        if values.shape == (count, count):
            values = values.diagonal()
        if values.shape not in ((count,), (count, 1)):
            raise RequestError(
                f"agreement {self.file}: found an output {list(values.shape)} of {count} pictures, "
                "expected [n], [n, 1] or [n, n]"
            )
        return values.reshape(count)[: len(pictures)]


def _takes_tokens(tensor: Any) -> bool:
    return tensor.type == "tensor(int64)" and len(tensor.shape) == 2
