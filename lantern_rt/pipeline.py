"""From prompts to pictures: the public way to generate.

A `Pipeline` is an opened bundle with its engines. Requests change nothing in it, so several threads may use one; every
call decodes its own batch. Prompts go through the condition graph,
and codes through the image decoder, one at a time: neither memory nor a single bit of an image depends on the batch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np
from PIL.Image import Image

from .bundle.files import Bundle, open_bundle
from .engines.host import available_memory
from .engines.ort.providers import ON_CPU, Providers
from .errors import BundleError, RequestError
from .inputs import check_int
from .memory import check_image_memory, compute_max_images
from .methods import Ar, Drafted, GenerationOptions, ImageSource, MethodConfig, Options, Relaxed, Sjd
from .output.images import blank_image, grey_out, to_image, with_record
from .prompts import ImageRequest, load_bundle_tokenizer
from .requests import Request, Settings, check_request, resolve_settings
from .results import Ints, Result, StreamState, StreamStep, build_result, recipe_fields
from .runtime.decode import decode
from .runtime.state import DrafterLayout, Model, PrefixRow, Prompt

if TYPE_CHECKING:
    from .engines.engine_folder import EngineFolder
    from .engines.loader import Engines
    from .runtime.likelihood import Likelihood


_LOG = logging.getLogger(__name__)
WARM_UP_STEPS = 3
MOST_TRIES = 64


class Pipeline:
    """Generates images from one bundle. Make one with `Pipeline.from_bundle`; several threads may use it.

    Close it with `close`, or use it as `with Pipeline.from_bundle(...) as pipe:`. Threads do not survive a fork, nor
    does a GPU: a process that was forked after loading is refused, and opens a pipeline of its own.
    """

    def __init__(self, bundle: Bundle, engines: Engines) -> None:
        self.bundle = bundle
        self._tokenizer = load_bundle_tokenizer(bundle)
        self._engines: Engines | None = engines
        self._free = available_memory() if engines.on_cpu else None
        self._process = os.getpid()

    @classmethod
    def from_bundle(
        cls,
        bundle: str | Path | Bundle = "scenes",
        threads: int | None = None,
        verify: bool = True,
        provider: str | Sequence[str] | None = None,
        engines: str | Path | EngineFolder | None = None,
    ) -> Pipeline:
        """Open and load a bundle.

        Args:
            bundle: an embedded one by name, a folder, `hf:owner/name[@revision]`, or one that is open already.
            threads: for the engines, by default one per physical core.
            verify: compare every file's hash first.
            provider: what ONNX Runtime runs the graphs on: `cpu`, `cuda`, `webgpu`, `openvino`, ... (docs/gpu.md), with
                `drafter=NAME`, `vq_decoder=NAME` or `condition=NAME` for one of them; by default `auto`, the GPU where
                there is one and a package for it, else the CPU.
            engines: a folder that `lantern-rt build-engine` made of this bundle, to run instead of its graphs.

        Raises:
            BundleError: the bundle is missing, damaged or of another format.
            EngineError: the backend is not installed, or does not take a graph.
            RequestError: a provider is unknown, or contradicts the engines.
        """
        from .engines.engine_folder import EngineFolder, open_engine_folder
        from .engines.loader import Engines, choose_providers

        folder = engines if engines is None or isinstance(engines, EngineFolder) else open_engine_folder(engines)
        chosen = Providers.read(() if provider is None else provider)
        if folder is not None and chosen not in (Providers(), ON_CPU):
            expected = f"{folder.manifest.backend}, which {folder.folder} was built for"
            raise RequestError(field="provider", found=str(chosen), expected=expected, remedy="leave the provider out")
        skipped_roles = folder.replaced() if folder else ()
        opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle, verify, skipped_roles)
        providers = choose_providers(chosen, opened) if folder is None else ON_CPU
        loaded = Engines(opened, threads, providers, folder)
        _LOG.info("opened bundle %s on %s, threads: %d", opened.manifest.name, loaded.backend, loaded.threads)
        return cls(opened, loaded)

    def close(self) -> None:
        """Let go of the engines and their memory; after that every request is a `RequestError`.

        Streams that have begun go on, but draw no images. A second call does nothing.
        """
        self._engines = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warm_up(self) -> None:
        """Load every graph and table and run the decoders, so that the first request takes no longer than others.

        Raises: BundleError, EngineError: a graph or table is damaged. RequestError: the pipeline was closed.
        """
        self.engines.load_all()
        manifest = self.bundle.manifest
        if manifest.neighbors:
            _ = self.bundle.neighbors
        _ = self.bundle.heads
        tokens = np.zeros(2, np.int64)
        row = PrefixRow(np.zeros((2, manifest.target.hidden_size), np.float32), np.ones(2, np.bool_), tokens)
        method = f"eagle:tree=chain-3:drafter={manifest.drafters[-1]}" if manifest.drafters else "ar"
        settings = resolve_settings(manifest, {"method": method, "cfg_scale": 2.0})
        model = self.model(self.engines, [settings.method])
        for _ in islice(decode(model, [Prompt(row, row)], [0], settings.sampling, settings.method), WARM_UP_STEPS):
            pass  # a few tokens of an image without a prompt
        _LOG.info("warmed up bundle %s", manifest.name)

    @property
    def engines(self) -> Engines:
        """What runs the bundle's graphs. Raises: RequestError: the pipeline was closed."""
        if self._engines is None:
            raise RequestError("closed", field="pipeline", remedy="call Pipeline.from_bundle again")
        if os.getpid() != self._process:
            remedy = "call Pipeline.from_bundle in every process, or start them by `spawn`"
            raise RequestError("loaded before this process was forked", field="pipeline", remedy=remedy)
        return self._engines

    def __call__(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        callback_on_step: Callable[[StreamStep], object] | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """Generate `num_images` images for every prompt, class id or text embedding.

        Args:
            prompts: what to draw, of known words or any text, as the bundle takes it.
            callback_on_step: called with what `stream` yields after every step; what it raises ends the call.
            options: what else to draw, how many, and how, see `Options`.

        Returns:
            Images, tokens and statistics, prompt by prompt.

        Raises:
            RequestError: names the parameter at fault, and the prompt where there are several.
            EngineError: the graphs cannot be run, or give NaN.
        """
        request = self.check(prompts, **options)
        for last in self.decode(request):
            if callback_on_step is not None:
                callback_on_step(last)
        return build_result(request.images, [last.image(i) for i in range(len(last.codes))], last)

    def stream(
        self, prompts: str | Sequence[str] | None = None, **options: Unpack[Options]
    ) -> Generator[StreamStep, None, None]:
        """Generate step by step; takes what a call takes, and checks it at once.

        Work is done only while the next step is waited for: stop iterating, or close the generator, to cancel.
        `step.image(i)` shows what is there of image i, and `step.stats` is set with the last step.

        Raises:
            RequestError: as a call does, and before the first step.
        """
        return self.decode(self.check(prompts, **options))

    def edit(
        self,
        image: ImageSource,
        mask: ImageSource | None = None,
        prompts: str | Sequence[str] | None = None,
        *,
        tries: int = 1,
        callback_on_step: Callable[[StreamStep], object] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Result:
        """Draw a part of a picture anew; takes what a call takes, where `Options` says what image and mask are.

        Cells outside the mask keep their codes. What is drawn sees those before it in raster order: above, and to the
        left. Pixels further outside than a cell are the picture's own. `keep_rows=8` in place of a mask draws a
        variation of which the first 8 rows of codes are kept.

        Args:
            image, mask, prompts, callback_on_step, options: as for a call.
            tries: drawings of which each image is the best, 1 .. 64: that under which the codes that are kept are most
                probable, so it fits what lies below. They have the seeds that follow, as of so many more images.

        Returns:
            As a call does; statistics are of all drawings.

        Raises:
            RequestError, EngineError: as a call does.
        """
        tries = check_int("tries", tries, 1, 1, MOST_TRIES)
        asked: Options = {**options, "image": image, "mask": mask}
        asked["num_images"] = tries * (options.get("num_images") or 1)
        result = self(prompts, callback_on_step=callback_on_step, **asked)
        if tries == 1:
            return result
        nats = [one.nats for one in self.likelihoods(result.codes, prompts, **asked)]
        best = [min(range(i, i + tries), key=nats.__getitem__) for i in range(0, len(nats), tries)]
        lists = ("images", "codes", "seeds", "prompts")
        chosen: dict[str, Any] = {name: [getattr(result, name)[i] for i in best] for name in lists}
        return replace(result, **chosen)

    def likelihoods(
        self, codes: Sequence[Ints], prompts: str | Sequence[str] | None = None, **options: Unpack[Options]
    ) -> list[Likelihood]:
        """Mean nats per token of each image's `codes [cells]` in the target's eyes, and their entropy.

        Takes what a call that made them takes. Guidance and temperature count, filters do not. Of a picture that is
        changed, codes that are kept count, if there are any.
        """
        from .runtime.likelihood import likelihood

        checked = self.check(prompts, **options)
        if len(codes) != len(checked.images):
            raise RequestError(field="codes", found=f"those of {len(codes)} images", expected=str(len(checked.images)))
        engines = self.engines
        method, size = checked.settings.method, checked.settings.size
        model, prefixes = self.model(engines, [method], size), self.prefixes(engines, checked.images)
        edits = [one.edit for one in checked.images]
        kept = [None if one is None or one.regenerated.all() else ~one.regenerated.ravel() for one in edits]
        sampling = checked.settings.sampling
        return [likelihood(model, p, c, sampling, k) for p, c, k in zip(prefixes, codes, kept, strict=True)]

    def check(self, prompts: str | Sequence[str] | None = None, **options: Unpack[Options]) -> Request:
        """A checked request, ready for `decode`; takes what a call takes.

        Raises:
            RequestError: names the parameter at fault.
        """
        request = check_request(self.bundle.manifest, self._tokenizer, prompts, **options)
        if request.images[0].edit is not None:
            request.images[0].edit.encode(self.engines.vq_encoder)
        return request

    def check_image_memory(self, request: Request) -> None:
        """Raises: RequestError: an image of the request takes more memory than there was beside the weights."""
        if self._free is not None:
            check_image_memory(self.bundle.manifest, request, self._free)

    def decode(self, request: Request) -> Generator[StreamStep, None, None]:
        """Decode a checked request, step by step.

        Raises:
            RequestError: there is no memory for it, or the pipeline was closed; before the first step.
        """
        engines = self.engines  # also when the pipeline is closed meanwhile
        self.check_image_memory(request)
        settings = self.adapt_settings(request.settings)
        max_images = compute_max_images(self.bundle.manifest, settings, engines.max_rows)
        return self._decode(engines, request.images, settings, min(len(request.images), max_images))

    def adapt_settings(self, settings: Settings) -> Settings:
        """Return the settings, off the CPU with the method that their preset has for devices.

        An exact window is no wider than the engines' passes.
        """
        if settings.quality is None or self.engines.on_cpu:
            return settings
        method = self.bundle.manifest.presets[settings.quality].devices or settings.method
        widest = self.engines.max_nodes - 1
        if isinstance(method, Sjd) and method.exact and method.window > widest:
            method = Sjd(window=widest) if widest else Ar()
        return replace(settings, method=method)

    def _decode(
        self, engines: Engines, images: Sequence[ImageRequest], settings: Settings, max_images: int
    ) -> Generator[StreamStep, None, None]:
        """Steps of a request, `max_images` images at a time."""
        model = self.model(engines, [settings.method], settings.size)
        seeds = [image.seed for image in images]
        prompts = self.prefixes(engines, images)
        adaptive = settings.quality is not None and engines.on_cpu
        state = StreamState(len(images), model.codes)
        for step in decode(model, prompts, seeds, settings.sampling, settings.method, max_images, adaptive=adaptive):
            yield state.add(step, settings, partial(self.draw, images, settings))
        stats = step.stats
        assert stats is not None
        _LOG.info(
            "%s: images: %d, tokens per forward pass: %.2f, seconds: %.2f",
            settings.method,
            len(images),
            stats.tokens_per_forward_pass,
            stats.seconds,
        )

    def prefixes(self, engines: Engines, images: Sequence[ImageRequest]) -> Iterator[Prompt]:
        """Prefix rows of every image of a request in turn; those of one prompt are computed once."""
        negative = images[0].negative
        instead = None if negative is None else engines.condition(negative.inputs)[0]
        edit = images[0].edit
        kept = None if edit is None else edit.encode(engines.vq_encoder)
        for _, same in groupby(images, lambda one: id(one.inputs)):
            image, *others = same
            cond, uncond = engines.condition(image.inputs)
            uncond = uncond if instead is None else instead
            if [(1, len(real)) for real in image.real] != [cond.shape[:2], uncond.shape[:2]]:
                problem = f"gave {cond.shape[:2]} and {uncond.shape[:2]} rows and tokens of a prompt"
                raise BundleError(problem, field=str(self.bundle.path("condition")), remedy="export the bundle again")
            if not (np.isfinite(cond).all() and np.isfinite(uncond).all()):
                problem = "gave NaN or infinity, its weights are damaged"
                raise BundleError(problem, field=str(self.bundle.path("condition")), remedy="export the bundle again")
            rows = zip((cond[0], uncond[0]), image.real, image.tokens or (None, None), strict=True)
            first, second = (PrefixRow(*row) for row in rows)
            yield from [Prompt(first, second, kept)] * (1 + len(others))

    def model(self, engines: Engines, methods: Sequence[MethodConfig] | None = None, size: str | None = None) -> Model:
        """Load what the runtime needs to generate images.

        Args:
            engines: loaded graphs.
            methods: methods that will run; graphs and tables that none of them reads stay unloaded. None: any method
                may run.
            size: name of the image size; None: the bundle's default.
        """
        manifest = self.bundle.manifest
        names = {field.name for field in fields(DrafterLayout)}
        layout = manifest.drafter.model_dump(include=names) if manifest.drafter else {}
        grid = manifest.size(size)
        if methods is None:
            uses_drafter = uses_heads = True
            uses_neighbors = manifest.neighbors > 0
        else:
            uses_drafter = any(isinstance(method, Drafted) and not method.uses_draft_heads for method in methods)
            uses_heads = any(isinstance(method, Sjd | Drafted) for method in methods)
            uses_neighbors = any(isinstance(method, Relaxed) and method.neighbors for method in methods)
        return Model(
            engines.target,
            engines.drafter if uses_drafter else None,
            grid.codes,
            manifest.target.max_positions,
            DrafterLayout(**layout),
            grid.columns,
            self.bundle.neighbors if uses_neighbors else None,
            engines.rounding,
            engines.max_nodes,
            manifest.row_end,
            self.bundle.heads if uses_heads else None,
        )

    def draw(self, images: Sequence[ImageRequest], settings: Settings, i: int, cells: Ints) -> Image:
        """The picture of image i from its cells, -1 for missing ones; with its record when it is whole."""
        manifest = self.bundle.manifest
        size = manifest.size(settings.size)
        edit = images[i].edit
        if edit is not None and edit.preserved is not None:
            cells = np.where(cells < 0, edit.preserved, cells)
        known = cells >= 0
        if not known.any():
            return blank_image(*manifest.pixels(size))
        filled = cells[np.maximum.accumulate(np.where(known, np.arange(len(cells)), 0))]  # as the last known one
        image = to_image(self.engines.vq_decoder(filled.reshape(1, size.rows, size.columns))[0])
        if edit is not None:
            image = edit.blend(image)
        if not known.all():
            return grey_out(image, known.reshape(size.rows, size.columns))
        return with_record(image, recipe_fields(self.bundle, settings, images[i]))
