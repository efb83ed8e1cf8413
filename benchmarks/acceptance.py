"""How many codes a target pass commits, by drafting and acceptance, on a bundle that takes words.

    python benchmarks/acceptance.py                                # every case; minutes
    python benchmarks/acceptance.py --prompts 4 --only sjd         # cases whose options mention sjd
    python benchmarks/acceptance.py --case '{"method": "sjd", "window": 12}'

Columns: codes per target pass, mean over images; drafter passes per target pass; total variation given away per
code (0 where acceptance is exact). Nothing here is a time, so the host's load does not matter. Prompts are complete
captions of unseen scenes and seeds are fixed.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np

from lantern_rt import LanternError, Pipeline, Result
from lantern_rt.train.scenes.vocabulary import describe, sample_scene

PROMPT_SEED, FIRST_SEED, BATCH = 920_000, 1000, 8
CASES: tuple[dict[str, Any], ...] = (
    {"method": "ar"},
    {"method": "sjd", "redraft": "independent", "start": "random"},
    {"method": "sjd", "redraft": "independent"},
    {"method": "sjd", "start": "random"},
    {"method": "sjd", "start": "above"},
    {"method": "sjd"},
    {"method": "sjd", "window": 2},
    {"method": "sjd", "window": 4},
    {"method": "sjd", "window": 16},
    {"method": "sjd", "redraft": "independent", "lambda_": 2},
    {"method": "sjd", "lambda_": 2},
    {"method": "sjd", "delta": 0.01},
    {"method": "sjd", "omega": 1.5},
    {"method": "sjd", "omega": 2, "anneal": 0.5},
    {"method": "sjd", "omega": 3, "anneal": 0.25},
    {"method": "eagle", "tree": "chain-4"},
    {"method": "eagle", "tree": "chain-4", "children": "likeliest"},
    {"method": "eagle", "tree": "balanced-25"},
    {"method": "eagle", "tree": "balanced-25", "children": "likeliest"},
    {"method": "eagle", "tree": "chain-4", "drafter_cfg_scale": 1},
    {"method": "eagle", "tree": "chain-4", "drafter_cfg_scale": 2},
    {"method": "eagle", "tree": "balanced-25", "drafter_cfg_scale": 1},
    {"method": "eagle", "tree": "chain-4", "stop": 0.1},
    {"method": "eagle", "tree": "chain-4", "children": "likeliest", "stop": 0.1},
    {"method": "eagle", "tree": "chain-4", "children": "likeliest", "stop": 0.3},
    {"method": "lantern++", "tree": "chain-4", "lambda_": 2},
    {"method": "lantern++", "tree": "chain-4", "neighbors": 0, "omega": 1.5},
    {"method": "lantern++", "tree": "chain-4", "neighbors": 0, "omega": 2, "anneal": 0.5},
)


def draw_prompts(count: int) -> list[str]:
    rng = np.random.default_rng(PROMPT_SEED)
    return [describe(scene, rng, complete=True) for scene in [sample_scene(rng) for _ in range(count)]]


def measure(pipe: Pipeline, options: dict[str, Any], prompts: list[str]) -> dict[str, float]:
    """Means over the images of all prompts."""
    results: list[Result] = []
    for start in range(0, len(prompts), BATCH):
        texts = prompts[start : start + BATCH]
        seeds = [FIRST_SEED + start + i for i in range(len(texts))]
        results.append(pipe(texts, seed=seeds, **options))
    shares = np.array([len(result.images) for result in results]) / len(prompts)
    stats = [result.stats for result in results]
    codes = len(results[0].codes[0])
    return {
        "codes_per_target_pass": float(shares @ [one.tokens_per_target_pass for one in stats]),
        "drafter_passes_per_target_pass": float(shares @ [one.drafter_passes / one.target_passes for one in stats]),
        "tvd_per_code": float(shares @ [one.realised_tvd / codes for one in stats]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", default="scenes")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--only", default="", help="cases whose options, as JSON, hold this text")
    parser.add_argument(
        "--case", action="append", type=json.loads, help="options as JSON, instead of the built-in cases"
    )
    arguments = parser.parse_args()
    try:
        pipe, prompts = Pipeline.from_bundle(arguments.bundle, arguments.threads), draw_prompts(arguments.prompts)
        print(f"{len(prompts)} prompts\n\n| options | codes a pass | drafter passes | TVD a code |")
        print("|---|---|---|---|")
        for options in arguments.case or CASES:
            if arguments.only not in json.dumps(options):
                continue
            found = measure(pipe, options, prompts)
            named = ", ".join(f"{name.rstrip('_')} {value}" for name, value in options.items() if name != "method")
            print(
                f"| `{options['method']}` {named} | {found['codes_per_target_pass']:.2f} "
                f"| {found['drafter_passes_per_target_pass']:.2f} | {found['tvd_per_code']:.4f} |",
                flush=True,
            )
    except LanternError as error:
        sys.exit(f"benchmark: {error}")


if __name__ == "__main__":
    main()
