"""A bundle of int8 weights, expanded when loaded: bits that stay, what is measured apart, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from refusals import refused

from lantern_rt import Pipeline, open_bundle
from lantern_rt.engines.build import build_engines
from lantern_rt.engines.loader import Engines
from lantern_rt.engines.profiles import BuildOptions
from lantern_rt.errors import RequestError
from lantern_rt.methods import Ar
from lantern_rt.runtime.passes import causal_pass

ROWS, NODES = 8, 17
CAPTIONS = np.random.default_rng(1).normal(size=(4, 6, 32)).astype(np.float32)


def first_nodes(engines: Engines, rows: int, nodes: int) -> list[np.ndarray]:
    """All outputs for the first two nodes of the first row, of a pass over `rows` chains of `nodes` codes."""
    codes = np.random.default_rng(0).integers(engines.target.spec.vocab_size, size=(ROWS, NODES))[:rows, :nodes]
    cache = engines.target.new_cache(rows, 64)
    output = engines.target.run(causal_pass(engines.target, cache, codes, NODES, np.zeros((rows, 0), bool)), cache)
    return [output.logits[0, :2], output.hidden[0, :2], *(new[:2, 0] for new in output.new_kv)]


def test_a_node_has_the_same_bits_in_every_layout_of_a_pass(t2i_int8_bundle: Path) -> None:
    bundle = open_bundle(t2i_int8_bundle)
    expected = first_nodes(Engines(bundle, 1, expand_weights=True), 1, 2)
    for threads in (1, 2):
        engines = Engines(bundle, threads, expand_weights=True)
        for rows in (1, ROWS):
            for nodes in (2, 4, 9, NODES):
                for one, other in zip(first_nodes(engines, rows, nodes), expected, strict=True):
                    np.testing.assert_array_equal(one, other)


def test_greedy_speculation_gives_the_codes_of_plain_decoding(t2i_int8_bundle: Path) -> None:
    pipe = Pipeline.from_bundle(t2i_int8_bundle, expand_weights=True)
    plain, *others = (
        pipe(embeddings=CAPTIONS, temperature=0, **options).codes
        for options in ({"method": "ar"}, {"method": "eagle", "tree": "mc-25"}, {"method": "sjd", "window": 7})
    )
    for codes in others:
        np.testing.assert_array_equal(codes, plain)


def test_auto_decodes_plainly_unless_integers_are_expanded(t2i_int8_bundle: Path) -> None:
    plain, raced = (
        Pipeline.from_bundle(t2i_int8_bundle, expand_weights=expand)(embeddings=CAPTIONS).settings
        for expand in (False, True)
    )
    assert plain.method == Ar()
    assert str(plain.choice).startswith("auto: ar, as at this precision other methods draw other pictures")
    assert "while drawing" in str(raced.choice)


def test_what_was_measured_without_expansion_does_not_count_with_it(t2i_int8_bundle: Path) -> None:
    bundle = open_bundle(t2i_int8_bundle)
    backends = [
        Pipeline.from_bundle(bundle, expand_weights=expand).situation(1, None, "").backend for expand in (False, True)
    ]
    assert backends == ["onnxruntime-cpu", "onnxruntime-cpu-expanded"]


def test_expansion_is_refused_where_no_integers_would_be_expanded(t2i_int8_bundle: Path, tmp_path: Path) -> None:
    options, engines = BuildOptions("onnxruntime"), tmp_path / "engines"
    build_engines(open_bundle(t2i_int8_bundle), "tiny", options, engines, False, lambda *_: None)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"provider": "cuda"}, "found provider cuda, expected provider cpu; leave it out"),
        ({"engines": engines}, f"found the engines {engines}, expected a bundle's own graphs; leave it out"),
    ]
    for given, words in wrong:
        with refused(RequestError, f"expand_weights: {words}"):
            Pipeline.from_bundle(t2i_int8_bundle, expand_weights=True, **given)
    with refused(RequestError, "expand_weights: found a target with fp32 weights, expected int8-weights or int4-"):
        Pipeline.from_bundle("scenes", expand_weights=True)
