"""From prompts to pictures: the public way to generate.

A `Pipeline` is an opened bundle with its engines. Requests change nothing in it but what was measured of this
host, so several threads may use one; every call decodes its own batch. Prompts go through the condition graph,
and codes through the image decoder, one at a time: neither memory nor a single bit of an image depends on the batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL.Image import Image

from .bundle.files import Bundle, open_bundle
from .errors import BundleError, RequestError
from .methods import Auto, MethodConfig, Relaxed
from .output.images import blank, grey_out, to_image
from .planning.auto import Chooser, with_default_method
from .planning.race import Race
from .planning.store import Situation
from .requests import Embeddings, ImageRequest, Request, Settings, bundle_tokenizer, check_request
from .results import Ints, Result, StreamStep
from .runtime.decode import decode
from .runtime.drafts import DrafterLayout, Model, PrefixRow, Prompt

if TYPE_CHECKING:
    from .engines.engine_folder import EngineFolder
    from .engines.loader import Engines
    from .runtime.engine import Engine
    from .runtime.likelihood import Likelihood


class Pipeline:
    """Generates images from one bundle. Make one with `Pipeline.from_bundle`."""

    def __init__(self, bundle: Bundle, engines: Engines) -> None:
        self.bundle = bundle
        self._engines = engines
        self._tokenizer = bundle_tokenizer(bundle)
        self._chooser = Chooser(bundle, engines)

    @classmethod
    def from_bundle(
        cls,
        bundle: str | Path | Bundle = "scenes",
        threads: int | None = None,
        verify: bool = True,
        provider: str = "cpu",
        engines: str | Path | EngineFolder | None = None,
        expand_weights: bool = False,
    ) -> Pipeline:
        """Open and load a bundle: an embedded one by name, a folder, or one that is open already.

        threads: for the engines, by default one per physical core. verify: compare every file's hash first.
        provider: what ONNX Runtime runs the graphs on, `cpu`, `cuda`, `openvino`, `coreml` or `directml`.
        engines: a folder that `lantern-rt build-engine` made of this bundle, to run instead of its graphs.
        expand_weights: turn the target's int8 or int4 weights to float32 when loading, on a CPU: as exact, large and
        fast as float32 weights.
        """
        from .engines.engine_folder import EngineFolder, open_engine_folder
        from .engines.loader import Engines

        folder = engines if engines is None or isinstance(engines, EngineFolder) else open_engine_folder(engines)
        if folder is not None and provider not in ("cpu", folder.manifest.provider):
            raise RequestError(
                f"provider: found {provider}, but {folder.folder} was built for "
                f"{folder.manifest.provider or folder.manifest.backend}; leave the provider out"
            )
        unread = folder.replaced() if folder else ()
        opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle, verify, unread)
        return cls(opened, Engines(opened, threads, provider, folder, expand_weights))

    def __call__(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        class_ids: int | Sequence[int] | None = None,
        embeddings: Embeddings | None = None,
        seed: int | Sequence[int] = 0,
        num_images: int = 1,
        **options: Any,
    ) -> Result:
        """Generate `num_images` images for every prompt, class id or text embedding.

        What a bundle takes is in its manifest: prompts (of known words, or any text), class ids, or embeddings, alone
        or with a mask `(embeddings, mask)`, right-padded, `[tokens, dim]` or `[prompts, tokens, dim]`. Image i of a
        prompt is drawn with seed + i, whatever else is in the batch; `seed` may be one number per prompt.

        options: `method` (a name such as `"lantern++"`, a method string such as `"sjd:window=5"`, or an object of
        `lantern_rt.methods`), parameters of the method (`tree`, `window`, `neighbors`, `delta`, `lambda_`, ...),
        `quality` for method `auto`, and `cfg_scale`, `temperature`, `top_k`, `top_p`. What is left out, or None, comes
        from the bundle.

        Raises: RequestError: names the parameter at fault, what was found and what to do.
        """
        options |= {"class_ids": class_ids, "embeddings": embeddings, "seed": seed, "num_images": num_images}
        request = self._check(prompts, **options)
        (last,) = deque(self.decode(request), maxlen=1)
        assert last.stats is not None
        images = [last.image(i) for i in range(len(last.codes))]
        seeds, labels = [image.seed for image in request.images], [image.label for image in request.images]
        return Result(images, last.codes, seeds, labels, last.stats, last.settings)

    def stream(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        class_ids: int | Sequence[int] | None = None,
        embeddings: Embeddings | None = None,
        seed: int | Sequence[int] = 0,
        num_images: int = 1,
        **options: Any,
    ) -> Generator[StreamStep, None, None]:
        """Generate step by step; takes what a call takes, and checks it at once.

        Work is done only while the next step is waited for: stop iterating, or close the generator, to cancel.
        """
        options |= {"class_ids": class_ids, "embeddings": embeddings, "seed": seed, "num_images": num_images}
        return self.decode(self._check(prompts, **options))

    def likelihoods(
        self, codes: Sequence[Ints], prompts: str | Sequence[str] | None = None, **request: Any
    ) -> list[Likelihood]:
        """Mean nats per token of each image's `codes [cells]` in the target's eyes, and their entropy.

        Takes what a call that made them takes. Guidance and temperature count, filters do not.
        """
        from .runtime.likelihood import likelihood

        checked = self._check(prompts, **request)
        if len(codes) != len(checked.images):
            raise RequestError(f"codes: found those of {len(codes)} images, expected {len(checked.images)}")
        model, prefixes = self._model([checked.settings.method]), self._prefixes(checked.images)
        return [likelihood(model, p, c, checked.settings.sampling) for p, c in zip(prefixes, codes, strict=True)]

    def decoders(self) -> tuple[Engine, Engine | None]:
        """The engines of target and drafter, for measuring passes."""
        return self._engines.target, self._engines.drafter

    def situation(self, images: int, temperature: float | None, quality: str) -> Situation:
        """What a choice of `auto` depends on besides the bundle; temperature None: the bundle's."""
        return self._chooser.situation(images, temperature, quality)

    def _check(self, prompts: str | Sequence[str] | None = None, **request: Any) -> Request:
        request = with_default_method(request)
        checked = check_request(self.bundle.manifest, self._tokenizer, prompts, **request)
        if not isinstance(checked.settings.method, Auto):
            return checked
        images, auto = checked.images, checked.settings
        return Request(images, self._chooser.choose(len(images), auto, lambda one: self.decode(Request(images, one))))

    def decode(self, request: Request) -> Generator[StreamStep, None, None]:
        """Decode a checked request, step by step; settings of method `auto` mean what a race finds."""
        settings, images = request.settings, request.images
        if not isinstance(settings.method, Auto):
            yield from self._decode(images, settings, None)
            return
        race = self._chooser.race(len(images), settings)
        try:
            yield from self._decode(images, settings, race)
        finally:
            self._chooser.give_back(len(images), settings, race)

    def _decode(
        self, images: Sequence[ImageRequest], settings: Settings, race: Race | None
    ) -> Generator[StreamStep, None, None]:
        prompts, seeds = self._prefixes(images), [image.seed for image in images]
        methods: list[MethodConfig] = [settings.method] if race is None else [*race.methods]
        codes: list[Ints] = [np.zeros(0, np.int64)] * len(images)
        first, others = (settings.method, []) if race is None else (race.method, methods)
        running = decode(self._model(methods), prompts, seeds, settings.sampling, first, others)
        following: MethodConfig | None = None
        done = False
        while not done:
            began = time.perf_counter()
            step = running.send(following)
            done = step.statistics is not None
            if race is not None:
                settings = replace(settings, method=race.method, choice=race.describe())
                if following is not None:
                    tokens = sum(len(part.codes) for part in step.parts) / len(step.parts)
                    race.record(tokens, time.perf_counter() - began)
                following = race.method
            new_codes, accepted = [np.zeros(0, np.int64)] * len(codes), [0] * len(codes)
            for part in step.parts:
                new_codes[part.request] = part.codes[: part.committed]
                accepted[part.request] = len(part.acceptance.path) - 1 if part.acceptance else 0
            codes = [np.concatenate(pair) for pair in zip(codes, new_codes, strict=True)]
            yield StreamStep(
                new_codes, codes, accepted, step, settings, self._draw, step.done, step.total, step.statistics
            )

    def _prefixes(self, images: Sequence[ImageRequest]) -> list[Prompt]:
        """Prefix rows of every image; those of one prompt are computed once."""
        prompts: list[Prompt] = []
        for _, same in groupby(images, lambda one: id(one.inputs)):
            image, *others = same
            cond, uncond = self._engines.condition(image.inputs)
            if [(1, len(real)) for real in image.real] != [cond.shape[:2], uncond.shape[:2]]:
                found = f"gave {cond.shape[:2]} and {uncond.shape[:2]} rows and tokens of a prompt"
                raise BundleError(f"bundle {self.bundle.folder}: the condition graph {found}; export the bundle again")
            if not (np.isfinite(cond).all() and np.isfinite(uncond).all()):
                raise BundleError(
                    f"bundle {self.bundle.folder}: the condition graph gave NaN or infinity; "
                    "its weights are damaged, export the bundle again"
                )
            rows = zip((cond[0], uncond[0]), image.real, image.tokens or (None, None), strict=True)
            prompts += [Prompt(*(PrefixRow(*row) for row in rows))] * (1 + len(others))
        return prompts

    def _model(self, methods: Sequence[MethodConfig]) -> Model:
        manifest, own = self.bundle.manifest, {one.name for one in fields(DrafterLayout)}
        layout = manifest.drafter.model_dump(include=own) if manifest.drafter else {}
        neighbors = any(isinstance(method, Relaxed) and method.neighbors for method in methods)
        return Model(
            self._engines.target,
            self._engines.drafter if any(method.needs_drafter for method in methods) else None,
            manifest.codes_per_image,
            manifest.target.max_positions,
            DrafterLayout(**layout),
            manifest.grid_columns,
            self.bundle.neighbors().indices if neighbors else None,
            self._engines.rounding,
        )

    def _draw(self, codes: Ints) -> Image:
        """The picture of an image's first codes."""
        manifest = self.bundle.manifest
        if not len(codes):
            return blank(manifest.image_width, manifest.image_height)
        missing = manifest.codes_per_image - len(codes)
        image = to_image(self._engines.vq_decoder(np.append(codes, np.repeat(codes[-1:], missing))[None])[0])
        return grey_out(image, len(codes), manifest.grid_rows, manifest.grid_columns) if missing else image
