"""Class ids, for bundles that generate images of classes."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from ..inputs import check_int
from .base import Option, Prefix, RequestContext, Row, Subject, Words

_HELP = "Class id, for class-conditional bundles; may be given several times."


class ClassId(Subject):
    option = Option("class_id", list[int], "ID", _HELP)
    words = Words("class_ids", "class_id", "class_id", option, json_type=int, chunk_type=int)
    conditions = frozenset(["class"])
    description = "class ids"
    item_name = "class id"
    title = "class {item}"

    @classmethod
    def make(cls, item: Any, name: str, context: RequestContext) -> Self:
        class_id = check_int(name, item, 0, 0, (context.condition.classes or 1) - 1)
        inputs = {"class_ids": np.array([class_id], np.int64)}
        is_real_token = np.ones(context.condition.prefix, np.bool_)
        return cls(class_id, Prefix(Row(inputs, 0, is_real_token), Row(inputs, 1, is_real_token)))
