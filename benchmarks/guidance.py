"""What guidance of the first tokens only gives and costs: `python benchmarks/guidance.py [IMAGES] [SPEED_TURNS]`.

Draws the default bundle's prompts with guidance of all tokens and of fewer, in turns. Prints the speed over plain
decoding with full guidance, the likelihood of the tokens under full guidance, less its entropy (excess, nats a token),
and the mean total variation distance between guided and conditional distributions over the tokens left unguided.
"""

from __future__ import annotations

import sys

import numpy as np

from lantern_rt import Pipeline
from lantern_rt.compare.turns import Contender, subjects_of, take_turns
from lantern_rt.runtime.likelihood import sequence_logits
from lantern_rt.runtime.sampling import guide, softmax
from lantern_rt.runtime.statistics import Clock

METHODS, INTERVALS = ("ar", "sjd:window=7", "rows:window=6", "rows:window=4"), (None, 190, 126, 62)


def distances(pipeline: Pipeline, codes: np.ndarray, request: dict[str, object]) -> np.ndarray:
    """Total variation distance between guided and conditional distributions at every token, `[cells]`."""
    checked = pipeline.check(**request, method="ar")
    model = pipeline.model(pipeline.engines, [checked.settings.method])
    prompt = next(pipeline.prefixes(pipeline.engines, checked.images))
    parts = list(sequence_logits(model, [prompt.cond, prompt.uncond], codes[:-1], Clock()))
    logits = np.concatenate(parts, axis=1)  # [2, cells, vocab_size]
    guided, plain = softmax(guide(logits, checked.settings.sampling, 0)), softmax(logits[0])
    return np.abs(guided - plain).sum(-1) / 2


def main(images: int, turns: int) -> None:
    with Pipeline.from_bundle("scenes") as pipeline:
        subjects = subjects_of(pipeline.bundle, None)
        contenders = [
            Contender(f"{method}, {interval}", {"method": method, "cfg_interval": interval})
            for method in METHODS
            for interval in INTERVALS
        ]
        requests = [subjects.request(i, 1) for i in range(max(images, turns))]
        for contender in contenders:  # shapes of passes are met once before they are timed
            pipeline(**requests[0], **contender.options)
        timed = list(take_turns(pipeline, contenders, requests[:turns], score=False))
        seconds = np.median([[run.seconds for run in turn] for turn in timed], axis=0)
        moved = list[np.ndarray]()
        excess = np.zeros((images, len(contenders)))
        for i, request in enumerate(requests[:images]):
            for k, contender in enumerate(contenders):
                codes = pipeline(**request, **contender.options).codes[0]
                (found,) = pipeline.likelihoods([codes], **request, method="ar")
                excess[i, k] = found.nats - found.entropy
                if k == 0:
                    moved.append(distances(pipeline, codes, dict(request)))
        print(f"{'method, cfg_interval':28}{'speed-up':>10}{'excess nats a token':>24}{'TVD of unguided':>18}")
        for k, contender in enumerate(contenders):
            interval = contender.options["cfg_interval"]
            away = np.mean(moved, axis=0)[interval + 2 :].mean() if interval is not None else 0.0
            error = 1.96 * excess[:, k].std(ddof=1) / np.sqrt(images)
            print(
                f"{contender.label:28}{seconds[0] / seconds[k]:10.2f}"
                f"{excess[:, k].mean():14.3f} +- {error:.3f}{away:18.3f}"
            )


if __name__ == "__main__":
    main(*(int(text) for text in (sys.argv[1:] + ["32", "8"][len(sys.argv) - 1 :])))
