"""The judge as a graph for `lantern-rt eval --agreement`: how much of what a caption names a picture shows.

Captions are read inside the graph, from the word ids of the bundle's tokenizer and by the templates of `vocabulary.py`:
other ways to say a thing are not understood, and what is not understood is not judged. Sizes and finishes are not
judged, as the judge does not see them.

Does not know the model that drew the pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...export.graph.graphs import Case, Graph, plan_graph
from ...export.graph.onnx_ops import Value
from ...export.parity import check_parity
from ...output.files import check_output, write_output
from .data import draw_scenes, render_scenes
from .judge import ABSENT, Judge, load_judge
from .render import SIZE
from .text import PAD, SLOTS, WORD_IDS, WORDS, encode_caption
from .vocabulary import (
    COLOURS,
    GROUND_PHRASES,
    GROUNDS,
    LEFT_OF,
    PLACE_PHRASES,
    PLACES,
    RIGHT_OF,
    SHAPE_WORDS,
    SHAPES,
    SKIES,
    SKY_PHRASES,
    describe,
)

_SPAN = 5  # words of the longest phrase
_NEVER = -1  # a word id that no caption has


class CaptionReader(nn.Module):
    """Word ids `[n, length]` -> what captions name, as indices from 1 with 0 for what they leave out.

    Sky, ground and place `[n]`, colours and shapes of the first two solids `[n, 2]`. The place is that of the first
    solid: a third of the picture, or its side of the second solid. What is named in two ways at once counts as left
    out.
    """

    skies: Tensor
    grounds: Tensor
    places: Tensor
    colours: Tensor
    shapes: Tensor

    def __init__(self) -> None:
        super().__init__()
        sides = {"left": LEFT_OF, "right": RIGHT_OF}
        places = {place: PLACE_PHRASES[place] + sides.get(place, ()) for place in PLACES}
        tables = (("skies", SKIES, SKY_PHRASES), ("grounds", GROUNDS, GROUND_PHRASES), ("places", PLACES, places))
        for name, entries, phrases in tables:
            self.register_buffer(name, _phrase_table(entries, phrases))
        self.register_buffer("colours", _word_table(COLOURS, {}))
        self.register_buffer("shapes", _word_table(SHAPES, SHAPE_WORDS))

    def forward(self, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        padded = F.pad(token_ids, (0, _SPAN - 1), value=PAD)
        windows = torch.stack([padded[:, k : k + token_ids.shape[1]] for k in range(_SPAN)], -1)
        sky, ground, place = (_named(windows, table) for table in (self.skies, self.grounds, self.places))
        shapes = self.shapes[token_ids]
        colours = self.colours[F.pad(token_ids, (1, 0), value=PAD)[:, :-1]]  # of the word before
        solid = (shapes > 0).long()
        order = solid * solid.cumsum(1)  # 1 at the first solid's word, 2 at the second's
        first_two = torch.stack([order == 1, order == 2], 1).long()  # [n, 2, length]
        return sky, ground, place, (first_two * colours[:, None]).sum(2), (first_two * shapes[:, None]).sum(2)


def _named(windows: Tensor, table: Tensor) -> Tensor:
    """Index from 1 of the one entry of `table [entries, phrases, 5]` that is said in `windows [n, length, 5]`."""
    wrong = (windows[:, :, None, None] != table) & (table != PAD)
    said = ((wrong.long().sum(-1) == 0).long().sum((1, 3)) > 0).long()  # [n, entries]
    index = (said * torch.arange(1, len(table) + 1)).sum(1)
    return index * (said.sum(1) == 1).long()


def _phrase_table(entries: tuple[str, ...], phrases: Mapping[str, tuple[str, ...]]) -> Tensor:
    """Word ids of every entry's phrases `[entries, phrases, 5]`; padding stands for any word."""
    most = max(len(phrases[entry]) for entry in entries)
    table = np.full((len(entries), most, _SPAN), _NEVER, np.int64)
    for i, entry in enumerate(entries):
        for j, phrase in enumerate(phrases[entry]):
            table[i, j] = encode_caption(phrase)[:_SPAN]
    return torch.from_numpy(table)


def _word_table(entries: tuple[str, ...], words: Mapping[str, tuple[str, ...]]) -> Tensor:
    """For every word id the index from 1 of the entry it means, or 0."""
    table = torch.zeros(len(WORDS), dtype=torch.int64)
    for i, entry in enumerate(entries, start=1):
        for word in words.get(entry, (entry,)):
            table[WORD_IDS[word]] = i
    return table


class JudgeAgreement(nn.Module):
    """Pictures `[n, 3, 128, 128]` in 0 .. 1 and word ids `[n, length]` -> agreement `[n]` in 0 .. 1.

    The mean of the probabilities that the judge gives to what the caption names: sky, ground, colour and shape of one
    or two solids, and their place. Solids are looked for at all places, and taken where the mean is largest; a place
    that is named counts only there. A caption that names nothing agrees with every picture.
    """

    beside: Tensor
    distinct: Tensor

    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self.judge, self.reader = judge, CaptionReader()
        first, second = torch.meshgrid(torch.arange(len(PLACES)), torch.arange(len(PLACES)), indexing="ij")
        named = [torch.zeros_like(first, dtype=torch.bool), first < second, first == 1, first > second]
        self.register_buffer("beside", torch.stack(named).float())  # [place named, place of first, place of second]
        self.register_buffer("distinct", (first != second).float())

    def forward(self, images: Tensor, token_ids: Tensor) -> Tensor:
        skies, grounds, colours, shapes = (logits.softmax(-1) for logits in self.judge(2 * images - 1))
        sky, ground, place, colour, shape = self.reader(token_ids)
        solids = _of_solids(colours, colour) + _of_solids(shapes, shape)  # [n, 2, places]
        there = 1 - colours[..., ABSENT]  # [n, places]
        alone = solids[:, 0] + F.one_hot(place, 1 + len(PLACES))[:, 1:] * there
        pairs = solids[:, 0, :, None] + solids[:, 1, None, :]
        pairs = pairs + self.beside[place] * there[:, :, None] * there[:, None, :]
        pairs = (pairs * self.distinct).flatten(1)
        best = torch.where(shape[:, 1] > 0, pairs.max(1).values, alone.max(1).values)
        told = torch.cat([torch.stack([sky, ground, place], 1), colour, shape], 1) > 0
        count = told.long().sum(1)
        total = _of_scene(skies, sky) + _of_scene(grounds, ground) + best
        return total / count.clamp(min=1) + (count == 0).float()


def _of_scene(found: Tensor, index: Tensor) -> Tensor:
    """Probabilities `[n]` of what is named, out of `found [n, classes]`; 0 where nothing is."""
    chosen = found.gather(1, (index - 1).clamp(min=0)[:, None])[:, 0]
    return chosen * (index > 0).float()


def _of_solids(found: Tensor, index: Tensor) -> Tensor:
    """Probabilities `[n, 2, places]` of what is named of two solids, out of `found [n, places, 1 + classes]`."""
    chosen = found.transpose(1, 2).gather(1, index[:, :, None].expand(-1, -1, len(PLACES)))
    return chosen * (index > 0).float()[:, :, None]


def judge_graph(judge: Judge, role: str = "judge") -> Graph:
    """The graph, to be checked on rendered scenes: each with its own caption and with another's."""
    rng = np.random.default_rng(0)
    scenes = draw_scenes(6, seed=1)
    images = render_scenes(scenes).transpose(0, 3, 1, 2).astype(np.float32) / 255
    ids = np.stack([encode_caption(describe(scene, rng)) for scene in scenes])
    inputs = (Value("images", ("n", 3, SIZE, SIZE)), Value("token_ids", ("n", "length"), "int64"))
    cases = (
        Case("own captions", {"images": images, "token_ids": ids}),
        Case("captions of others, cut", {"images": images[:5], "token_ids": ids[1:, : SLOTS - 4]}),
    )
    return Graph(role, JudgeAgreement(judge).eval(), inputs, (Value("agreement", ("n",)),), cases)


def write_judge_graph(output: Path, work: Path | None, force: bool) -> None:
    """Write the graph of a work folder's judge, or of the recipe's own, as one file."""
    check_output(output, force)
    graph = judge_graph(load_judge(work))
    plan = plan_graph(graph, "lossless")
    with TemporaryDirectory() as folder:
        path, *_ = plan.write(Path(folder) / "judge.onnx")
        check_parity(graph, path, plan=plan)
        model = onnx.load(path)  # with the weights
    write_output(output, model.SerializeToString(), force)
