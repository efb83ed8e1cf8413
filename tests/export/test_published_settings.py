"""Default sampling, image sizes and row ends of families, as in the published programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_copies import EMU3, GLM_IMAGE, LUMINA, LUMINA2
from edited_checkpoints import READERS
from goldens import DATA, load_golden

from lantern_rt.export.families.common import list_grid_shapes
from lantern_rt.export.families.common_lumina import list_patch_grids
from lantern_rt.export.families.emu3 import NEGATIVE
from lantern_rt.methods import Sampling
from lantern_rt.runtime.raster import RowEndLayout

LUMINA_SETTINGS, LUMINA2_SETTINGS, EMU3_SETTINGS, EMU35_SETTINGS = (
    json.loads((DATA / folder / "protocol.json").read_text())
    for folder in ("lumina-mgpt", "lumina-mgpt-2", "emu3", "emu3.5")
)
LUMINA2_DEFAULTS = LUMINA2_SETTINGS["defaults"]
SAMPLING = {
    LUMINA: Sampling(cfg_scale=LUMINA_SETTINGS["cfg"], top_k=2000),  # top-k for images is from LANTERN
    LUMINA2: Sampling(
        cfg_scale=LUMINA2_DEFAULTS["cfg"],
        cfg_final=4.0,
        top_k=LUMINA2_DEFAULTS["image_top_k"],
        temperature=LUMINA2_DEFAULTS["temperature"],
    ),
    EMU3: Sampling(cfg_scale=EMU3_SETTINGS["cfg_default"], top_k=EMU3_SETTINGS["top_k_default"]),
    GLM_IMAGE: Sampling(temperature=0.9, top_p=0.75),
}


@pytest.mark.parametrize("checkpoint", SAMPLING, ids=lambda path: path.parent.name)
def test_default_sampling_equals_the_published(checkpoint: Path) -> None:
    contents: Any = READERS[checkpoint](checkpoint)
    assert contents.manifest_fields["sampling"] == SAMPLING[checkpoint]


@pytest.mark.parametrize("pixels", ["512", "768"])
def test_image_sizes_of_lumina2_equal_the_published(pixels: str) -> None:
    sizes = [[32 * columns, 32 * rows] for rows, columns in list_patch_grids(int(pixels) // 32)]
    assert sorted(sizes) == sorted(LUMINA2_SETTINGS["sizes"][pixels])


def test_image_sizes_of_emu3_equal_the_published() -> None:
    published = [tuple(size) for size in EMU3_SETTINGS["sizes_for_image_area_518400"].values()]
    assert list_grid_shapes(EMU3_SETTINGS["image_area_default"], 8) == published


def test_the_negative_prompt_of_emu3_is_the_published() -> None:
    assert EMU3_SETTINGS["negative_default"] == NEGATIVE


@pytest.mark.parametrize(
    ("folder", "row_end", "name", "rows", "columns"),
    [
        ("emu3", EMU3_SETTINGS["tokens"]["eol"], "90x90", 90, 90),
        ("emu3", EMU3_SETTINGS["tokens"]["eol"], "68x120", 68, 120),
        ("emu3.5", EMU35_SETTINGS["tokens"]["eol"], "41x97", 41, 97),
        ("emu3.5", EMU35_SETTINGS["tokens"]["eol"], "55x73", 55, 73),
        ("lumina-mgpt-2", LUMINA2_SETTINGS["tokens"]["<reserved08799>"], "16x24", 64, 96),
        ("lumina-mgpt-2", LUMINA2_SETTINGS["tokens"]["<reserved08799>"], "24x24", 96, 96),
        ("lumina-mgpt-2", LUMINA2_SETTINGS["tokens"]["<reserved08799>"], "32x18", 128, 72),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_row_ends_are_where_the_published_program_forces_them(
    folder: str, row_end: dict[str, int], name: str, rows: int, columns: int
) -> None:
    forced = load_golden(folder)[f"official_forced_{name}"].tolist()  # -1 is a code
    layout = RowEndLayout(rows * columns, columns, row_end=row_end["official"])
    tokens = layout.insert_row_ends(np.full(layout.num_codes, -1)).tolist()
    start = forced.index(-1)
    end = start + len(tokens)
    assert forced[start:end] == tokens
    assert -1 not in forced[end:]
