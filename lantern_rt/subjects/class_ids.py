"""Class ids, for bundles that generate images of classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from ..inputs import check_int
from .base import Prefix, RequestContext, Row, Subject, Words


@dataclass(frozen=True, eq=False)
class ClassId(Subject):
    words: ClassVar[Words] = Words(
        "class_ids",
        "class_id",
        "class_id",
        "class_id",
        option_type=list[int],
        metavar="ID",
        help="Class id, for class-conditional bundles; may be given several times.",
        json_type=int,
        chunk_type=int,
    )
    conditions: ClassVar[frozenset[str]] = frozenset(["class"])
    description: ClassVar[str] = "class ids"
    item_name: ClassVar[str] = "class id"
    is_text: ClassVar[bool] = False

    @classmethod
    def make(cls, item: Any, name: str, context: RequestContext) -> Self:
        condition = context.condition
        class_id = check_int(name, item, 0, 0, (condition.classes or 1) - 1)
        inputs = {"class_ids": np.array([class_id], np.int64)}
        is_real_token = np.ones(condition.prefix, np.bool_)
        return cls(class_id, Prefix(Row(inputs, 0, is_real_token), Row(inputs, 1, is_real_token)))

    @classmethod
    def describe_item(cls, item: Any, index: int) -> str:
        return f"class {item}"

    def file_stem(self, index: int, option: Any) -> str:
        return f"class-{self.label}"
