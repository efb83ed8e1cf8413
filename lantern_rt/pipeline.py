"""The public pipeline, from prompts to images.

A `Pipeline` is an open bundle with its engines. Calls do not change it, so several threads may share a pipeline. Every
call decodes a separate batch. The condition graph and the image decoder run on one prompt or image at a time, so that
neither memory nor any bit of an image depends on the batch.
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

from .bundle.files import Bundle, open_bundle
from .completion import supported_methods
from .edits import check_supports_edits
from .engines.host import available_memory
from .engines.ort.providers import ON_CPU, ProviderChoice
from .errors import RequestError
from .inputs import check_int
from .memory import compute_max_images
from .methods import Autoregressive, SpeculativeJacobi
from .options import GenerationOptions, ImageSource, Options
from .output.images import attach_recipe, grey_out_cells, image_from_pixels, make_blank_image
from .output.progress import progress_bars
from .prepared import PreparedRequest, load_model, make_decode_settings
from .prompts import ImageRequest, load_bundle_tokenizer
from .requests import GenerationSettings, Request, check_request, resolve_settings
from .results import Ints, Result, StreamState, StreamStep, build_recipe_fields, build_result
from .runtime.decode import decode
from .runtime.state import PrefixRow, Prompt

if TYPE_CHECKING:
    from .engines.engine_folder import EngineFolder
    from .engines.loader import BundleEngines
    from .runtime.likelihood import Likelihood

_LOG = logging.getLogger(__name__)
WARM_UP_STEPS = 3
MAX_TRIES = 64


class Pipeline:
    """Image generator for one bundle, made by `Pipeline.from_bundle`. Several threads may share it.

    Call `close` when done, or use `with Pipeline.from_bundle(...) as pipe:`. Neither threads nor a GPU survive a fork:
    in a process forked after loading, every call raises an error; open another pipeline there.

    Attributes:
        bundle: the open bundle.
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
            bundle: name of an embedded or published model, folder, `hf:owner/name[@revision]`, or an open bundle.
            threads: number of CPU threads, from 1; None: one per physical core.
            verify: whether to compare the SHA-256 hash of every file with the manifest.
            provider: execution provider of ONNX Runtime: `cpu`, `cuda`, ... (docs/gpu.md); also `GRAPH=NAME` for the
                drafter, vq_decoder or condition. None: `auto`, the GPU if its package is installed, else the CPU.
            engines: folder of TensorRT engines that `build-engine` built from it, to run instead of its graphs.
            download: whether to download and export a published model that is not in the cache, without asking.

        Returns:
            The pipeline, which the caller closes.

        Raises:
            BundleError: the bundle is missing, damaged or of another format.
            EngineError: the backend is not installed, or rejects a graph.
            RequestError: a provider is unknown, or contradicts the engines.
        """
        from .engines.engine_folder import EngineFolder, open_engine_folder
        from .engines.loader import BundleEngines, choose_providers
        from .published import resolve_bundle_name

        folder = engines if engines is None or isinstance(engines, EngineFolder) else open_engine_folder(engines)
        requested = ProviderChoice.parse(() if provider is None else provider)
        if folder is not None and requested not in (ProviderChoice(), ON_CPU):
            expected = f"{folder.manifest.backend}, which {folder.folder} was built for"
            raise RequestError(field="provider", found=str(requested), expected=expected, remedy="omit the provider")
        if isinstance(bundle, str):
            bundle = resolve_bundle_name(bundle, download)
        skipped_roles = folder.list_replaced_files() if folder else ()
        opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle, verify, skipped_roles)
        providers = choose_providers(requested, opened) if folder is None else ON_CPU
        loaded = BundleEngines(opened, threads, providers, folder)
        _LOG.info("opened bundle %s on %s, threads: %d", opened.manifest.name, loaded.backend, loaded.threads)
        return cls(opened, loaded)

    def close(self) -> None:
        """Close the pipeline and release the engines' memory. A second call does nothing.

        Later requests raise `RequestError`. Streams that have begun continue, but cannot decode images.
        """
        self._engines = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warm_up(self) -> None:
        """Load every graph and table and run a few steps, so that the first request is not slower.

        Raises:
            BundleError: a table is damaged.
            EngineError: a graph is damaged.
            RequestError: the pipeline was closed.
        """
        self.engines.load_all()
        manifest = self.bundle.manifest
        if manifest.neighbors:
            _ = self.bundle.neighbor_table
        _ = self.bundle.draft_heads
        tokens = np.zeros(2, np.int64)
        row = PrefixRow(np.zeros((2, manifest.target.hidden_size), np.float32), np.ones(2, np.bool_), tokens)
        method, *_ = supported_methods(manifest, ("eagle:drafter=eagle", "eagle:drafter=heads", "ar"))
        settings = resolve_settings(manifest, {"method": method, "cfg_scale": 2.0})
        model = load_model(self.bundle, self.engines, [settings.method])
        plan = make_decode_settings(manifest, settings, self.engines)
        steps = decode(model, plan, [Prompt(row, row)], [0])
        for _ in islice(steps, WARM_UP_STEPS):
            pass  # the tokens are not used: they belong to an image without a prompt
        _LOG.info("warmed up bundle %s", manifest.name)

    @property
    def engines(self) -> BundleEngines:
        """The loaded graphs of the bundle.

        Raises:
            RequestError: the pipeline was closed, or loaded before this process was forked.
        """
        if self._engines is None:
            raise RequestError("closed", field="pipeline", remedy="call Pipeline.from_bundle again")
        if os.getpid() != self.process:
            remedy = "call Pipeline.from_bundle in every process, or start them by `spawn`"
            raise RequestError("loaded before this process was forked", field="pipeline", remedy=remedy)
        return self._engines

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
            prompts: one prompt or several; None if class ids or embeddings are given in `options`.
            callback_on_step: function called with the `StreamStep` of every step; an exception in it ends the call.
            progress: whether to show a progress bar, on stderr or below a notebook's cell.
            options: see `Options`.

        Returns:
            Images, tokens and statistics, in the order of the prompts.

        Raises:
            RequestError: an option is invalid; the error names it, and the prompt if there are several.
            EngineError: a graph cannot run, or its output is NaN.
        """
        request = self.check(prompts, **options)
        with progress_bars() if progress else nullcontext() as show:
            for last in self.decode(request):
                if show is not None:
                    show("tokens", last.done, last.total)
                if callback_on_step is not None:
                    callback_on_step(last)
        decoded = [last.image(i) for i in range(len(last.codes))] if self.bundle.manifest.makes_images else []
        return build_result(request.images, decoded, last)

    def stream(
        self, prompts: str | Sequence[str] | None = None, **options: Unpack[Options]
    ) -> Generator[StreamStep, None, None]:
        """Generate step by step. Stop iterating, or close the generator, to cancel.

        Args:
            prompts: same as for a call of the pipeline.
            options: same as for a call of the pipeline.

        Returns:
            A generator of steps, which works only while the caller waits for the next. `step.image(i)` decodes image i
            as far as it is generated; `step.stats` is set in the last step.

        Raises:
            RequestError: same as for a call of the pipeline, before the first step.
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
        progress: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> Result:
        """Generate a part of an image again.

        Tokens outside the mask are preserved. A new token attends to the cells before it in raster order: above, and to
        the left. Pixels more than one cell outside the mask do not change.

        Args:
            image: image to edit, see `Options`.
            mask: cells to generate again, see `Options`; None: `keep_rows` or transparent pixels select them.
            prompts: same as for a call of the pipeline; None: the prompt recorded in the image.
            tries: number of candidates per image, 1 .. 64, with consecutive seeds; the result is the candidate that
                gives the preserved tokens the highest probability.
            callback_on_step: same as for a call of the pipeline.
            progress: same as for a call of the pipeline.
            options: same as for a call of the pipeline.

        Returns:
            The images, tokens and statistics; statistics include all candidates.

        Raises:
            RequestError, EngineError: same as for a call of the pipeline.
        """
        tries = check_int("tries", tries, 1, 1, MAX_TRIES)
        check_supports_edits(self.bundle.manifest)
        request: Options = {**options, "image": image, "mask": mask}
        request["num_images"] = tries * (options.get("num_images") or 1)
        result = self(prompts, callback_on_step=callback_on_step, progress=progress, **request)
        if tries == 1:
            return result
        nats = [likelihood.nats for likelihood in self.likelihoods(result.codes, prompts, **request)]
        best = [min(range(i, i + tries), key=nats.__getitem__) for i in range(0, len(nats), tries)]
        names = ("images", "codes", "seeds", "prompts")
        selected: dict[str, Any] = {name: [getattr(result, name)[i] for i in best] for name in names}
        return replace(result, **selected)

    def likelihoods(
        self, codes: Sequence[Ints], prompts: str | Sequence[str] | None = None, **options: Unpack[Options]
    ) -> list[Likelihood]:
        """Compute the negative log-likelihood of images under the target model.

        Guidance and temperature apply; top-k and top-p do not.

        Args:
            codes: tokens of each image, int64 `[cells]`, in the order of the prompts.
            prompts: same as for the call that generated them.
            options: same as for the call that generated them.

        Returns:
            Mean negative log-likelihood and mean entropy of each image, nats per token. For an edit, the mean is over
            the preserved tokens, if there are any.

        Raises:
            RequestError: same as for a call of the pipeline, or the number of images differs.
        """
        request = self.check(prompts, **options)
        if len(codes) != len(request.images):
            raise RequestError(field="codes", found=f"{len(codes)} images", expected=f"{len(request.images)} images")
        return self.prepare(request).likelihoods(codes)

    def check(self, prompts: str | Sequence[str] | None = None, **options: Unpack[Options]) -> Request:
        """Check a request before anything is computed.

        Args:
            prompts: same as for a call of the pipeline.
            options: same as for a call of the pipeline.

        Returns:
            The checked request, ready for `decode`.

        Raises:
            RequestError: an option is invalid; the error names it.
        """
        request = check_request(self.bundle.manifest, self._tokenizer, prompts, **options)
        if request.images[0].edit is not None:
            request.images[0].edit.encode(self.engines.encode_images)
        return request

    def prepare(self, request: Request) -> PreparedRequest:
        """Plan how these engines decode a request, and check that there is memory for it.

        Args:
            request: request that `check` returned.

        Returns:
            The request with everything that the runtime needs.

        Raises:
            RequestError: one image needs more memory than was free after loading (GPU memory is not checked), or the
                pipeline was closed.
        """
        engines = self.engines
        settings = self.adapt_settings_to_engines(request.settings)
        max_images = compute_max_images(
            self.bundle.manifest, request.images, settings, engines.max_rows, self._free_bytes
        )
        plan = make_decode_settings(
            self.bundle.manifest, settings, engines, settings.quality is not None and engines.on_cpu
        )
        return PreparedRequest(self.bundle, engines, request.images, settings, plan, max_images)

    def decode(self, request: Request) -> Generator[StreamStep, None, None]:
        """Generate the images of a checked request, step by step.

        Args:
            request: request that `check` returned.

        Returns:
            A generator of steps, as from `stream`. It continues after `close`, but cannot decode images then.

        Raises:
            RequestError: there is not enough memory, or the pipeline was closed; before the first step.
        """
        return self._generate_steps(self.prepare(request))

    def adapt_settings_to_engines(self, settings: GenerationSettings) -> GenerationSettings:
        """Replace a preset's method by its method for GPUs, unless the engines run on the CPU.

        An exact window is limited to the maximum number of nodes in a forward pass of the engines.

        Args:
            settings: settings of a request, as `check` returned them.

        Returns:
            The settings, perhaps with another method.

        Raises:
            RequestError: the pipeline was closed.
        """
        if settings.quality is None or self.engines.on_cpu:
            return settings
        method = self.bundle.manifest.presets[settings.quality].devices or settings.method
        max_window = self.engines.max_nodes - 1  # without the root node
        if isinstance(method, SpeculativeJacobi) and method.exact and method.window > max_window:
            method = SpeculativeJacobi(window=max_window) if max_window else Autoregressive()
        return replace(settings, method=method)

    def _generate_steps(self, request: PreparedRequest) -> Generator[StreamStep, None, None]:
        images = request.images
        settings = request.settings
        state = StreamState(len(images), request.plan.layout.num_codes)
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
        """Decode image i of a request from its tokens.

        Args:
            image_index: index of the image.
            codes_by_cell: token of each cell, int64 `[codes_by_cell]`; -1 in cells that are not generated yet, which
                become grey.

        Returns:
            The image; a complete one has its recipe in `info`.

        Raises:
            RequestError: the pipeline was closed, or the bundle has no image decoder.
        """
        self.bundle.check_makes_images()
        manifest = self.bundle.manifest
        size = manifest.size(settings.size)
        edit = images[image_index].edit
        if edit is not None and edit.preserved_codes is not None:
            codes_by_cell = np.where(codes_by_cell < 0, edit.preserved_codes, codes_by_cell)
        known = codes_by_cell >= 0
        if not known.any():
            return make_blank_image(*manifest.size_in_pixels(size))
        # The decoder needs a token in every cell: repeat the last known token.
        filled = codes_by_cell[np.maximum.accumulate(np.where(known, np.arange(len(codes_by_cell)), 0))]
        image = image_from_pixels(self.engines.decode_images(filled.reshape(1, size.rows, size.columns))[0])
        if edit is not None:
            image = edit.blend_with_original(image)
        if not known.all():
            return grey_out_cells(image, known.reshape(size.rows, size.columns))
        return attach_recipe(image, build_recipe_fields(self.bundle, settings, images[image_index]))
