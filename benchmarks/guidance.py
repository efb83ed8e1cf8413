"""Measure guidance for a part of the image: likelihood and agreement, compared with guidance for the whole image.

    git archive 49e8523 lantern_rt/bundles/scenes | tar x -C work    # the last `scenes` that needs guidance
    PYTHONPATH=. python benchmarks/guidance.py work/lantern_rt/bundles/scenes --count 400

Images of captions of the recipe of `scenes`, by an exact method. Excess NLL is under the fully guided target, in nats
per token; agreement is the judge's, in points. Prints means, and differences to full guidance with 95 % intervals.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from lantern_rt import Pipeline
from lantern_rt.compare.image_graph import PromptAgreementModel, read_preprocessing
from lantern_rt.compare.statistics import estimate_mean
from recipes.scenes.evaluate import sample_prompts

SHARES = ("100%", "75%", "50%", "25%", "0%")
METHOD = "sjd:window=3"
BATCH = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--judge", type=Path, default=Path("recipes/scenes/judge.onnx"))
    parser.add_argument("--count", type=int, default=400, help="captions")
    arguments = parser.parse_args()
    figures: dict[str, list[list[float]]] = {name: [[] for _ in SHARES] for name in ("excess", "agreement", "equal")}
    with Pipeline.from_bundle(arguments.bundle) as pipeline:
        judge = PromptAgreementModel(arguments.judge, read_preprocessing(arguments.judge), pipeline.bundle)
        _, prompts = sample_prompts(arguments.count)
        for start in range(0, len(prompts), BATCH):
            texts = prompts[start : start + BATCH]
            seeds = list(range(start, start + len(texts)))
            results_by_share = [pipeline(texts, seed=seeds, method=METHOD, cfg_tokens=share) for share in SHARES]
            for i, result in enumerate(results_by_share):
                scores = pipeline.likelihoods(result.codes, texts, seed=seeds, cfg_tokens="100%")
                figures["excess"][i] += [score.nats - score.entropy for score in scores]
                figures["agreement"][i] += (100 * judge(result.images, texts)).tolist()
                equal = zip(result.codes, results_by_share[0].codes, strict=True)
                figures["equal"][i] += [
                    float(np.mean(partial_codes == full_codes)) for partial_codes, full_codes in equal
                ]
    for name, values in figures.items():
        for share, figure in zip(SHARES, estimate_mean(values, 1), strict=True):
            difference = figure["difference_to_ar"]
            print(f"{name:10} {share:>5} {figure['value']:8.3f} {difference['value']:+8.3f}", end="")
            print(f" [{difference['low']:+.3f}, {difference['high']:+.3f}]")


if __name__ == "__main__":
    main()
