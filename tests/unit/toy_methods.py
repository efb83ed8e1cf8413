"""Methods, and a table of neighbours, for tests with the toy engines."""

from __future__ import annotations

import numpy as np

from lantern_rt.methods import Autoregressive, Eagle, Lantern, LanternPlusPlus, MethodConfig, SpeculativeJacobi

VOCABULARY = 5
NEIGHBORS = np.array([[n for n in range(VOCABULARY) if n != code] for code in range(VOCABULARY)])
STATIC_TREE = "tree-3-210-100"
EXACT_METHODS: dict[str, MethodConfig] = {
    "ar": Autoregressive(),
    "eagle, static": Eagle(tree=STATIC_TREE),
    "eagle, chain": Eagle(tree="chain-2"),
    "eagle, dynamic": Eagle(tree="dynamic-8-3-3"),
    "sjd": SpeculativeJacobi(window=4),
}
RELAXED_METHODS: dict[str, MethodConfig] = {
    "lantern": Lantern(tree="dynamic-8-3-3", neighbors=3, delta=0.2),
    "lantern++": LanternPlusPlus(tree=STATIC_TREE, neighbors=3),
    "lantern++, published": LanternPlusPlus(tree=STATIC_TREE, neighbors=3, residual="neighborhood"),
    "sjd, relaxed": SpeculativeJacobi(window=3, neighbors=3, lambda_=1.5),
}
METHODS = EXACT_METHODS | RELAXED_METHODS
