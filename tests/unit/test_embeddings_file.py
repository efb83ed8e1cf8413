"""Text embeddings from a file: images equal the images of embeddings from Python, and invalid files are rejected."""

from __future__ import annotations

import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_bundle import CAPTION, PREFIX

from lantern_rt import Pipeline
from lantern_rt.subjects import embeddings as embeddings_module


def make_random_embeddings(prompts: int = 3, tokens: int = PREFIX) -> dict[str, Any]:
    """Return the arrays of an embeddings file: `[prompts, tokens, caption_dim]`, and a mask `[prompts, tokens]`."""
    values = np.random.default_rng(1).normal(size=(prompts, tokens, CAPTION)).astype(np.float32)
    return {"embeddings": values, "mask": np.arange(tokens) < np.array([[2], [tokens], [1]])[:prompts]}


def test_a_files_embeddings_generate_the_images_of_pythons(program: Any, embeddings_bundle: Path) -> None:
    arrays = make_random_embeddings(2)
    np.savez("Two Texts.npz", **arrays)
    options = ("--embeddings", "Two Texts.npz", "--count", 2, "--seed", 4, "--threads", 1, "--json")
    code, out, _ = program("run", embeddings_bundle, *options)
    images = json.loads(out)["images"]
    assert code == 0
    assert [(image["embedding"], image["seed"]) for image in images] == [(0, 4), (0, 5), (1, 4), (1, 5)]
    assert images[3]["output"] == "two-texts-1-seed5.png"
    pipeline = Pipeline.from_bundle(embeddings_bundle, threads=1)
    result = pipeline(embeddings=(arrays["embeddings"], arrays["mask"]), seed=4, num_images=2)
    assert [image["codes"] for image in images] == [codes.tolist() for codes in result.codes]
    options_without_seed = ("--embeddings", "Two Texts.npz", "--count", 2, "--threads", 1)
    out = program("run", embeddings_bundle, *options_without_seed, "--seed", 4)[1]
    assert out.splitlines() == [image["output"] for image in images]  # the files exist already
    np.savez("Two Texts.npz", **{**arrays, "embeddings": -arrays["embeddings"]})
    out = program("run", embeddings_bundle, *options_without_seed, "--seed", 5)[1]
    assert out.splitlines()[0] == "two-texts-0-seed5-2.png"
    code, _, err = program("run", embeddings_bundle, "--from", images[0]["output"])
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_a_file_without_a_mask_and_with_any_float_is_valid(program: Any, embeddings_bundle: Path, kind: Any) -> None:
    np.savez("states.npz", embeddings=make_random_embeddings(1, 2)["embeddings"].astype(kind))
    result = program("run", embeddings_bundle, "--embeddings", "states.npz", "--seed", 0)
    assert result[:2] == (0, "states-0-seed0.png\n")


ONE_PROMPT = np.zeros((1, 2, CAPTION))  # embeddings of one prompt of two tokens


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"states": ONE_PROMPT}, "found arrays states, expected embeddings, and optionally mask"),
        ({**make_random_embeddings(1), "more": ONE_PROMPT}, "found arrays embeddings, mask, more"),
        ({"embeddings": ONE_PROMPT.astype(int)}, r"found embeddings int64 \[1, 2, 6\], expected floats \[prompts"),
        ({"embeddings": ONE_PROMPT[0]}, r"found embeddings float64 \[2, 6\]"),
        ({"embeddings": ONE_PROMPT[:0]}, r"found embeddings float64 \[0, 2, 6\]"),
        ({"embeddings": np.array([["x"]], object)}, "pickle|Object arrays"),
        ({"embeddings": ONE_PROMPT, "mask": np.full((1, 2), 0.5)}, "found mask float64 .* 0 and 1"),
        ({"embeddings": ONE_PROMPT, "mask": np.full((1, 2), 2)}, "found mask int64 .* 0 and 1"),
        ({"embeddings": ONE_PROMPT, "mask": np.ones((1, 3), bool)}, r"found mask \[1, 3\] for embeddings"),
        ({"embeddings": ONE_PROMPT[:, :, :5]}, r"--embeddings: found \[1, 2, 5\]"),
        ({"embeddings": ONE_PROMPT, "mask": np.array([[0, 1]])}, "--embeddings: found a mask with gaps"),
        ({"embeddings": np.full_like(ONE_PROMPT, np.nan)}, "--embeddings: found NaN or infinity"),
        ({"embeddings": np.full_like(ONE_PROMPT, 1e300)}, "--embeddings: found NaN or infinity"),
    ],
)
def test_invalid_arrays_of_a_file_are_rejected(program: Any, embeddings_bundle: Path, arrays: Any, reason: str) -> None:
    np.savez("states.npz", **arrays)
    code, out, err = program("run", embeddings_bundle, "--embeddings", "states.npz")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(reason, err), err
    assert os.listdir() == ["states.npz"]


def test_a_file_that_is_too_large_or_no_archive_is_rejected(
    program: Any, embeddings_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("text.npz").write_text("not an archive")
    np.save("array.npy", ONE_PROMPT)
    os.mkfifo("fifo.npz")
    with zipfile.ZipFile("damaged.npz", "w") as archive:
        archive.writestr("embeddings.npy", b"\x93NUMPY\x01\x00" + b"\xff" * 40)
    for name in ("text.npz", "array.npy", "fifo.npz", "damaged.npz", "none.npz", "."):
        code, _, err = program("run", embeddings_bundle, "--embeddings", name)
        assert (code, err.count("\n")) == (2, 1), err
        assert err.startswith(f"lantern-rt: {name}: ")
    np.savez("states.npz", **make_random_embeddings())
    monkeypatch.setattr(embeddings_module, "BYTES_LIMIT", 100)
    assert "embeddings.npy has " in program("run", embeddings_bundle, "--embeddings", "states.npz")[2]
