"""The embedded model: images whose requests come while others are drawn are bit for bit those drawn alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from lantern_rt import Pipeline
from lantern_rt.requests import check_request
from lantern_rt.runtime.grid import Raster
from lantern_rt.runtime.scheduler import Scheduler
from lantern_rt.runtime.state import Request

OPTIONS: list[dict[str, Any]] = [
    {"method": "ar"},
    {"method": "sjd:window=7", "temperature": 0.7},
    {"method": "eagle:tree=dynamic-16", "cfg_scale": 1.0},
    {"method": "sjd:window=3:lambda=1.5", "top_k": 100},
    {"method": "rows:window=3"},
    {"method": "lantern++:lambda=2:tree=chain-3"},
]


def test_images_that_join_each_other_late_are_those_drawn_alone() -> None:
    pipe = Pipeline.from_bundle("scenes", threads=1)
    manifest = pipe.bundle.manifest
    prompts = pipe.bundle.path("prompts").read_text("utf-8").splitlines()[: len(OPTIONS)]
    requests, raster = [], Raster(manifest.codes_per_image, manifest.grid_columns)
    for i, (prompt, options) in enumerate(zip(prompts, OPTIONS, strict=True)):
        checked = check_request(manifest, pipe._tokenizer, prompt, seed=90 + i, **options)
        settings = checked.settings
        (one,) = pipe.prefixes(pipe.engines, checked.images)
        rows = one.rows(settings.sampling)
        requests.append(
            Request(
                i,
                raster,
                rows,
                settings.sampling,
                [settings.method],
                checked.images[0].seed,
            )
        )
    scheduler, step = Scheduler(pipe.model(pipe.engines, [request.method for request in requests])), 0
    while scheduler.busy or step <= 40:
        if step % 10 == 0 and step // 10 < len(requests):
            scheduler.submit(requests[step // 10])
        scheduler.step()
        step += 1
    for request, prompt, options in zip(requests, prompts, OPTIONS, strict=True):
        alone = pipe(prompt, seed=request.seed, **options)
        np.testing.assert_array_equal(request.codes[: raster.codes], alone.codes[0])
