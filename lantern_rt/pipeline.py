"""Public pipeline from prompts to images.

Calls do not change a pipeline, so several threads may share it; every call decodes a batch of its own. The condition
graph reads one prompt at a time and the image decoder one image, so their memory, and every bit of an image, do not
depend on the batch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np
from PIL.Image import Image

from .bundle.files import Bundle
from .completion import list_supported_methods
from .engines.host import available_memory
from .engines.ort.providers import ON_CPU, ProviderChoice
from .errors import RequestError
from .hints import suggest_name
from .inputs import check_int
from .memory import compute_max_images
from .options import GenerationOptions, ImageSource, Options, name_options
from .output.images import attach_recipe, convert_pixels_to_image, grey_out_undecoded_cells, make_blank_image
from .output.progress import show_progress_bars
from .prepared import PreparedRequest, load_model, make_plan
from .requests import GenerationSettings, Request, check_request, resolve_settings
from .results import Ints, Result, StreamStep, StreamStepBuilder, build_recipe_fields, build_result
from .runtime.decode import decode
from .runtime.state import PrefixRow, Prompt
from .subjects.base import ImageRequest
from .subjects.image_input import check_supports_edits
from .text.tokenizers import load_bundle_tokenizer

if TYPE_CHECKING:
    from .engines.engine_folder import EngineFolder
    from .engines.loader import BundleEngines
    from .runtime.likelihood import Likelihood

_LOG = logging.getLogger(__name__)
WARM_UP_STEPS = 3  # the prefill, and two steps with drafts
MAX_TRIES = 64  # maximum number of candidates of an edit


class Pipeline:
    """Image generator for one bundle, which `Pipeline.from_bundle` opens. Several threads may share a pipeline.

    Call `close` at the end, or write `with Pipeline.from_bundle(...) as pipe:`. Threads and GPU contexts do not survive
    a fork, so every call in a process that was forked after loading raises an error: open a new pipeline there.

    Attributes:
        bundle: open bundle.
        process: id of the process that loaded the bundle.
    """

    def __init__(self, bundle: Bundle, engines: BundleEngines) -> None:
        self.bundle = bundle
        self._tokenizer = load_bundle_tokenizer(bundle)
        self._engines: BundleEngines | None = engines
        self._free_bytes = available_memory() if engines.on_cpu else None
        self.process = os.getpid()

    @classmethod
    def from_bundle(
        cls,
        bundle: str | Path | Bundle = "scenes",
        threads: int | None = None,
        verify: bool = True,
        provider: str | Sequence[str] | None = None,
        engines: str | Path | EngineFolder | None = None,
        download: bool = False,
    ) -> Pipeline:
        """Open a bundle and load its target model.

        Args:
            bundle: name of an embedded or published model, or its repository `owner/name`; folder of a bundle,
                `hf:owner/name[@revision]` on the Hugging Face Hub, or an open bundle.
            threads: number of CPU threads, from 1; None: one per physical core.
            verify: whether to compare the SHA-256 hash of every file with the manifest.
            provider: execution provider of ONNX Runtime, such as `cpu` or `cuda` (docs/gpu.md). `GRAPH=NAME` sets the
                provider of one graph: `drafter`, `vq_decoder` or `condition`. None: `auto`, which is the GPU if the
                package for it is installed, else the CPU.
            engines: folder of TensorRT engines that `build-engine` built from the bundle. These engines
                run instead of the graphs of the bundle.
            download: whether to download a published model that is not in the cache, and export the model if it has no
                finished bundle.

        Returns:
            The pipeline, which the caller closes.

        Raises:
            BundleError: the bundle is missing, damaged or of another format.
            EngineError: the backend is not installed, or rejects a graph.
            RequestError: a provider is unknown, or contradicts the engines.
        """
        from .engines.engine_folder import EngineFolder, open_engine_folder
        from .engines.loader import BundleEngines, choose_providers
        from .model_names import open_model

        folder = engines if engines is None or isinstance(engines, EngineFolder) else open_engine_folder(engines)
        requested = ProviderChoice.parse(() if provider is None else provider)
        if folder is not None and requested not in (ProviderChoice(), ON_CPU):
            expected = f"{folder.manifest.backend}, which {folder.folder} was built for"
            raise RequestError(field="provider", found=str(requested), expected=expected, remedy="omit the provider")
        if isinstance(bundle, Bundle):
            opened = bundle
        else:
            replaced = folder.list_replaced_files() if folder else ()  # graphs whose engines run instead
            opened = open_model(bundle, download, verify=verify, skipped_roles=replaced)
        providers = choose_providers(requested, opened) if folder is None else ON_CPU
        loaded = BundleEngines(opened, threads, providers, folder)
        _LOG.info("opened bundle %s on %s, threads: %d", opened.manifest.name, loaded.backend, loaded.threads)
        return cls(opened, loaded)

    from_pretrained = from_bundle  # its name in diffusers and transformers

    def __repr__(self) -> str:
        manifest = self.bundle.manifest
        place = "closed" if self._engines is None else f"{self._engines.backend}, threads: {self._engines.threads}"
        return f"<Pipeline: {manifest.name}, {manifest.size().name}, {place}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            hint = suggest_name(name, dir(self))
            raise AttributeError(f"Pipeline has no attribute {name!r}" + (f"; {hint}" if hint else ""))

    def close(self) -> None:
        """Close the pipeline, and release the memory of its engines. A second call has no effect.

        Later requests raise `RequestError`. A stream that has begun continues, but its steps cannot decode images.
        """
        self._engines = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warm_up(self) -> None:
        """Load every graph and table, and run a few decoding steps, so that the first request is as fast as later ones.

        Raises:
            BundleError: a table is damaged.
            EngineError: a graph is damaged.
            RequestError: the pipeline was closed.
        """
        self.engines.load_all()
        manifest = self.bundle.manifest
        if manifest.neighbors:
            _ = self.bundle.neighbor_table
        _ = self.bundle.draft_heads  # the property loads the heads
        # A prefix of two zero embeddings is enough, because the tokens are discarded.
        tokens = np.zeros(2, np.int64)
        row = PrefixRow(np.zeros((2, manifest.target.hidden_size), np.float32), np.ones(2, np.bool_), tokens)
        method, *_ = list_supported_methods(manifest, ("eagle:drafter=eagle", "eagle:drafter=heads", "ar"))
        settings = resolve_settings(manifest, {"method": method, "cfg_scale": 2.0})
        model = load_model(self.bundle, self.engines, [settings.method])
        plan = make_plan(manifest, settings, self.engines)
        steps = decode(model, plan, [Prompt(row, row)], [0])
        for _ in islice(steps, WARM_UP_STEPS):
            pass
        _LOG.info("warmed up bundle %s", manifest.name)

    @property
    def engines(self) -> BundleEngines:
        """Loaded graphs of the bundle.

        Raises:
            RequestError: the pipeline was closed, or loaded before this process was forked.
        """
        if self._engines is None:
            raise RequestError("closed", field="pipeline", remedy="call Pipeline.from_bundle again")
        if os.getpid() != self.process:
            remedy = "call Pipeline.from_bundle in every process, or start processes by `spawn`"
            raise RequestError("loaded before this process was forked", field="pipeline", remedy=remedy)
        return self._engines

    @name_options
    def __call__(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        callback_on_step: Callable[[StreamStep], object] | None = None,
        progress: bool = False,
        **options: Unpack[Options],
    ) -> Result:
        """Generate `num_images` images for every prompt, class id or text embedding.

        Args:
            prompts: one prompt, or a list of prompts; None if `options` has class ids, token ids or embeddings. The
                tokens of the model limit a prompt, and 16 characters per token (at least 2,000 are allowed).
            callback_on_step: function that is called with the `StreamStep` of every step. If the function raises an
                exception, the call ends with this exception.
            progress: whether to show a progress bar, on stderr or below a notebook's cell.
            options: keyword arguments, which `Options` describes.

        Returns:
            Images, tokens and statistics, in the order of the prompts.

        Raises:
            RequestError: an option is invalid. The error names the option and, if there are several prompts, the
                prompt.
            EngineError: a graph cannot run, or its output is NaN or infinity.
        """
        request = self.check(prompts, **options)
        with show_progress_bars() if progress else nullcontext() as show:
            for last in self.decode(request):
                if show is not None:
                    show("tokens", last.done, last.total)
                if callback_on_step is not None:
                    callback_on_step(last)
        decoded = [last.image(i) for i in range(len(last.codes))] if self.bundle.manifest.makes_images else []
        return build_result(request.images, decoded, last)

    @name_options
    def stream(
        self, prompts: str | Sequence[str] | None = None, **options: Unpack[Options]
    ) -> Generator[StreamStep, None, None]:
        """Generate images, and return the state after each decoding step. Takes the arguments of a call.

        To cancel, stop iterating or close the generator.

        Returns:
            A generator of steps, which computes a step only when the caller asks for the next step. `step.image(i)`
            decodes the cells of image i that are generated so far. `step.stats` is None before the last step.

        Raises:
            RequestError: as a call, before the first step.
        """
        return self.decode(self.check(prompts, **options))

    @name_options
    def edit(
        self,
        image: ImageSource,
        mask: ImageSource | None = None,
        prompts: str | Sequence[str] | None = None,
        *,
        tries: int = 1,
        callback_on_step: Callable[[StreamStep], object] | None = None,
        progress: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> Result:
        """Generate a part of an image again. Takes the arguments of a call, and:

        Tokens outside the mask are preserved. A new token attends only to cells before it in raster order: the rows
        above, and the cells to its left. Pixels more than one cell outside the mask do not change.

        Args:
            image: image to edit, in any form that `Options` describes.
            mask: mask of the cells to generate again, in any form that `Options` describes. None: `keep_rows` or
                transparent pixels of the image select the cells.
            prompts: one prompt, or a list of prompts; None: the prompt in the recipe of the image.
            tries: number of candidates per image, 1 .. 64, with consecutive seeds. The result has the candidate in
                which the preserved tokens have the highest probability.

        Returns:
            The images, tokens and statistics. The statistics include all candidates.

        Raises:
            RequestError: as a call, or the bundle cannot edit images.
            EngineError: as a call.
        """
        tries = check_int("tries", tries, 1, 1, MAX_TRIES)
        check_supports_edits(self.bundle.manifest)
        request: Options = {**options, "image": image, "mask": mask}
        request["num_images"] = tries * (options.get("num_images") or 1)
        result = self(prompts, callback_on_step=callback_on_step, progress=progress, **request)
        if tries == 1:
            return result
        nats = [likelihood.nats for likelihood in self.likelihoods(result.codes, prompts, **request)]
        # The candidates of an image follow each other. Index of the most likely candidate of each image:
        best = [min(range(i, i + tries), key=nats.__getitem__) for i in range(0, len(nats), tries)]
        names = ("images", "codes", "seeds", "prompts")
        selected: dict[str, Any] = {name: [getattr(result, name)[i] for i in best] for name in names}
        return replace(result, **selected)

    def likelihoods(
        self, codes: Sequence[Ints], prompts: str | Sequence[str] | None = None, **options: Unpack[Options]
    ) -> list[Likelihood]:
        """Compute the negative log-likelihood of images under the target model.

        The likelihood is computed with guidance and temperature, but without top-k and top-p. A token that these
        filters exclude would have an infinite negative log-likelihood.

        Args:
            codes: tokens of each image, int64 `[cells]`, in the order of the prompts.
            prompts: prompts of the call that generated the images.
            options: options of that call.

        Returns:
            Mean negative log-likelihood and mean entropy of each image, in nats per token. For an edited image, only
            the preserved tokens count.

        Raises:
            RequestError: as a call, or `codes` has another number of images.
        """
        request = self.check(prompts, **options)
        if len(codes) != len(request.images):
            raise RequestError(field="codes", found=f"{len(codes)} images", expected=f"{len(request.images)} images")
        return self.prepare(request).likelihoods(codes)

    def check(self, prompts: str | Sequence[str] | None = None, **options: Unpack[Options]) -> Request:
        """Check the arguments of a call before images are generated, and return a request for `decode`.

        Raises:
            RequestError: an option is invalid; the error names the option.
        """
        request = check_request(self.bundle.manifest, self._tokenizer, {"prompts": prompts, **options})
        for part in request.images[0].parts:
            part.encode(self.engines.encode_images)
        return request

    def prepare(self, request: Request) -> PreparedRequest:
        """Adapt the settings of a checked request to the engines, and check the memory for one image on a CPU."""
        engines = self.engines
        settings = self.adapt_settings_to_engines(request.settings)
        max_images = compute_max_images(
            self.bundle.manifest, request.images, settings, engines.max_rows, self._free_bytes
        )
        # A request that names a method gets the window that it names. On a GPU a wide window costs little.
        adaptive_window = settings.quality is not None and engines.on_cpu
        plan = make_plan(self.bundle.manifest, settings, engines, adaptive_window)
        return PreparedRequest(self.bundle, engines, request.images, settings, plan, max_images)

    def decode(self, request: Request) -> Generator[StreamStep, None, None]:
        """Generate the images of a checked request, as `stream` does; RequestError if there is not enough memory."""
        return self._generate_steps(self.prepare(request))

    def adapt_settings_to_engines(self, settings: GenerationSettings) -> GenerationSettings:
        """Return the settings with the preset's method for GPUs, unless the engines run on the CPU.

        The window of exact `sjd` is also shortened to the maximum number of nodes of the engines.
        """
        if settings.quality is None or self.engines.on_cpu:
            return settings
        method = self.bundle.manifest.presets[settings.quality].devices or settings.method
        return replace(settings, method=method.limit_nodes(self.engines.max_nodes))

    def _generate_steps(self, request: PreparedRequest) -> Generator[StreamStep, None, None]:
        images = request.images
        settings = request.settings
        state = StreamStepBuilder(len(images), request.plan.layout.num_codes)
        decode_image = partial(self.decode_image, images, settings)
        max_images = min(len(images), request.max_images)
        for step in decode(request.model(), request.plan, request.prompts(), request.seeds, max_images):
            yield state.add_step(step, settings, decode_image)
        assert step.stats is not None
        figures = step.stats.tokens_per_forward_pass, step.stats.seconds
        _LOG.info("%s: %d images, %.2f tokens per forward pass, %.2f s", settings.method, len(images), *figures)

    def decode_image(
        self, images: Sequence[ImageRequest], settings: GenerationSettings, image_index: int, codes_by_cell: Ints
    ) -> Image:
        """Decode image `image_index` from the token of each cell, int64 `[cells]`, -1 in cells that are still grey."""
        self.bundle.check_has_image_decoder()
        manifest = self.bundle.manifest
        size = settings.image_size
        preserved_codes = images[image_index].preserved_codes
        if preserved_codes is not None:  # shown from the first step on
            codes_by_cell = np.where(codes_by_cell < 0, preserved_codes, codes_by_cell)
        codes_by_cell = codes_by_cell[size.first_codes :]
        known = codes_by_cell >= 0
        if not known.any():
            return make_blank_image(*manifest.size_in_pixels(size))
        # The image decoder needs a token in every cell. Cells without a token repeat the last token before them.
        filled = codes_by_cell[np.maximum.accumulate(np.where(known, np.arange(len(codes_by_cell)), 0))]
        image = convert_pixels_to_image(self.engines.decode_images(filled.reshape(1, size.rows, size.columns))[0])
        for part in images[image_index].parts:
            image = part.finish_image(image)
        if not known.all():
            return grey_out_undecoded_cells(image, known.reshape(size.rows, size.columns))
        return attach_recipe(image, build_recipe_fields(self.bundle, settings, images[image_index]))
