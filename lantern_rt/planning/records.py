"""What the stored files of tuning share: strict records, and a way of drafting and accepting.

Does not know measurements, costs or files.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Drafting = Literal["eagle", "lantern", "lantern++", "sjd"]
_NUMBERS = ("neighbors", "delta", "lambda_", "omega", "anneal", "children")


class Part(BaseModel):
    """Base of the stored records: immutable, no unknown fields, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Relaxing(Part):
    """How drafts are made and accepted, as a request says it; None: the request leaves it out."""

    neighbors: int | None = None
    delta: float | None = None
    lambda_: float | None = None
    omega: float | None = None
    anneal: float | None = None
    children: Literal["sampled", "likeliest"] | None = None

    def relaxing(self) -> dict[str, str | int | float]:
        """The request parameters among these fields that are set."""
        return {name: value for name in _NUMBERS if (value := getattr(self, name)) is not None}


class Candidate(Relaxing):
    """A drafting method with its relaxation; the tree or the window is not part of it."""

    method: Drafting

    @property
    def exact(self) -> bool:
        """Whether the output has the target's own distribution."""
        return self.delta is None and self.lambda_ is None and self.omega is None

    @property
    def label(self) -> str:
        """The candidate in a few words."""
        words = {
            "neighbors": f"{self.neighbors} neighbours" if self.neighbors else "",
            "delta": f"delta {self.delta:g}" if self.delta is not None else "",
            "lambda_": f"lambda {self.lambda_:g}" if self.lambda_ is not None else "",
            "omega": f"omega {self.omega:g}" if self.omega is not None else "",
            "children": "likeliest children" if self.children == "likeliest" else "",
        }
        return ", ".join([self.method, *(word for word in words.values() if word)])
