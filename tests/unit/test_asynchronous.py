"""Tasks of an event loop get the images that the pipeline generates, and free their places when they are cancelled."""

from __future__ import annotations

import asyncio
import gc
import io
import random
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from idle_service import wait_until_idle
from PIL import Image

from lantern_rt import Pipeline, RequestError, Result
from lantern_rt.asynchronous import AsyncPipeline

PROMPTS = ["red cube", "a green sphere", "red sphere on sand", "green cube on snow"]
METHODS = [None, "ar", "eagle:tree=chain-3", "sjd:window=5"]


def is_same(first: Result, second: Result) -> bool:
    pixels = [[image.tobytes() for image in result.images] for result in (first, second)]
    return all(np.array_equal(*pair) for pair in zip(first.codes, second.codes, strict=True)) and pixels[0] == pixels[1]


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 120))


def test_tasks_get_the_images_of_the_pipeline(pipe: Pipeline, tmp_path: Path) -> None:
    async def main() -> None:
        async with await AsyncPipeline.from_bundle(pipe.bundle, threads=1, max_images_per_pass=3) as pipeline:
            requests = [{"prompts": prompt, "seed": i, "method": METHODS[i]} for i, prompt in enumerate(PROMPTS)]
            results = await asyncio.gather(*(pipeline.generate(**request) for request in requests))
            for result, request in zip(results, requests, strict=True):
                alone = pipe(**request)
                assert is_same(result, alone)
                assert (result.seeds, result.prompts) == (alone.seeds, alone.prompts)
            steps = [step async for step in pipeline.stream("red cube", seed=5)]
            assert np.array_equal(steps[-1].codes[0], pipe("red cube", seed=5).codes[0])
            assert (await pipeline.image(steps[0], 0)).size == results[0].images[0].size
            with pytest.raises(RequestError, match="magic"):
                await pipeline.generate("red cube", method="magic")
        with pytest.raises(RequestError, match="closed"):
            await pipeline.generate("red cube")

    run(main())


def test_closing_waits_for_images_but_not_for_streams_that_are_not_read(pipe: Pipeline) -> None:
    async def main() -> None:
        for drain in (True, False):
            pipeline = AsyncPipeline(Pipeline.from_bundle(pipe.bundle, threads=1), max_images_per_pass=2)
            await pipeline.generate("red cube", method="ar")
            steps = pipeline.stream("green cube", seed=3, method="ar")
            first = await anext(steps)
            generating = asyncio.create_task(pipeline.generate("red cube", seed=1, num_images=2, method="ar"))
            await asyncio.sleep(0)  # the request arrives, but may not be checked yet
            await pipeline.close(drain)
            with pytest.raises(RequestError, match="closed"):
                await pipeline.image(first, 0)
            if drain:
                assert len((await generating).images) == 2
                assert [step async for step in steps][-1].stats is not None
            else:
                await asyncio.gather(generating, return_exceptions=True)

    run(main())


def test_a_new_request_is_possible_at_once_after_a_timeout(pipe: Pipeline) -> None:
    async def main() -> None:
        async with AsyncPipeline(
            Pipeline.from_bundle(pipe.bundle, threads=1), max_images_per_pass=1, max_queued_images=0
        ) as pipeline:
            for patience in (0.0005, 0.001, 0.002, 0.004, 0.008):
                with suppress(TimeoutError):
                    await asyncio.wait_for(pipeline.generate("red cube", num_images=1, method="ar"), patience)
            assert (await pipeline.generate("red cube")).images

    run(main())


def test_a_cancelled_load_closes_its_pipeline(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Pipeline.from_bundle(pipe.bundle, threads=1)
    started = threading.Event()
    proceed = threading.Event()
    earlier_threads = {*threading.enumerate()}

    def load(*_: object) -> Pipeline:
        started.set()
        assert proceed.wait(60)
        return loaded

    async def main() -> None:
        loading = asyncio.create_task(AsyncPipeline.from_bundle(pipe.bundle, threads=1))
        await asyncio.to_thread(started.wait, 60)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        proceed.set()

    monkeypatch.setattr(Pipeline, "from_bundle", load)
    run(main())
    for thread in {*threading.enumerate()} - earlier_threads:
        thread.join(60)
        assert not thread.is_alive(), thread.name
    with pytest.raises(RequestError, match="closed"):
        loaded("red cube")


def test_closing_that_is_cancelled_still_ends_the_service(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()
    proceed = threading.Event()

    def check(*_: object, **__: object) -> None:
        started.set()
        assert proceed.wait(60)
        raise RequestError("it is rejected", field="prompt")

    async def main() -> None:
        pipeline = AsyncPipeline(Pipeline.from_bundle(pipe.bundle, threads=1))
        monkeypatch.setattr(pipeline.pipeline, "check", check)
        generating = asyncio.create_task(pipeline.generate("red cube"))
        await asyncio.to_thread(started.wait, 60)
        closing = asyncio.create_task(pipeline.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        proceed.set()
        await asyncio.gather(generating, return_exceptions=True)
        while pipeline.service.is_open:
            await asyncio.sleep(0.01)

    run(main())


def test_a_service_outlives_the_event_loops_of_its_requests(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = AsyncPipeline(Pipeline.from_bundle(pipe.bundle, threads=1))
    listeners: list[Any] = []
    submit = pipeline.service.submit

    def record(listener: Any, *prompts: Any, **options: Any) -> Any:
        listeners.append(listener)
        return submit(listener, *prompts, **options)

    async def begin() -> None:
        async with aclosing(pipeline.stream("red cube", num_images=4, method="ar")) as steps:
            await anext(steps)

    monkeypatch.setattr(pipeline.service, "submit", record)
    run(begin())
    listeners[0](RequestError("news after the end of the event loop", field="prompt"))
    run(pipeline.close())
    assert not caplog.records


def make_png(side: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


def make_rejecting_reader(unpacking: threading.Event, proceed: threading.Event) -> Callable[..., Image.Image]:
    """Return a reader of images that sets `unpacking`, waits for `proceed`, and rejects the image."""

    def unpack(name: str, source: bytes, header_only: bool = False) -> Image.Image:
        if header_only:
            return Image.open(io.BytesIO(source))
        unpacking.set()
        assert proceed.wait(60)
        raise RequestError("it is rejected", field="image")

    return unpack


def test_texts_do_not_wait_for_edits_and_callers_of_edits_alternate(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    unpacking = threading.Event()
    proceed = threading.Event()

    async def main() -> None:
        async with AsyncPipeline(Pipeline.from_bundle(pipe.bundle, threads=1), max_images_per_pass=2) as pipeline:

            async def edit(caller: str) -> None:
                with pytest.raises(RequestError) as caught:
                    async with aclosing(
                        pipeline.stream_updates("red cube", image=make_png(8), caller=caller)
                    ) as updates:
                        await anext(updates)
                order.append(f"{caller} {caught.value.field}")

            edits_of_many = [asyncio.create_task(edit("many")) for _ in range(5)]
            await asyncio.to_thread(unpacking.wait, 60)
            edit_of_one = asyncio.create_task(edit("one"))
            assert (await pipeline.generate("red cube", method="ar")).images, "a text does not wait for images"
            proceed.set()
            await asyncio.gather(edit_of_one, *edits_of_many)
            assert order.index("one image") <= 1
            proceed.clear()
            waiting = [asyncio.create_task(edit("many")) for _ in range(3)]
            await asyncio.sleep(0)
            closing = asyncio.create_task(pipeline.close(drain=False))
            await asyncio.sleep(0)
            proceed.set()
            await asyncio.gather(closing, *waiting)
            assert "many pipeline" in order, "waiting edits are rejected without reading their images"

    monkeypatch.setattr("lantern_rt.edits.read_image", make_rejecting_reader(unpacking, proceed))
    monkeypatch.setattr("lantern_rt.requests.read_image", make_rejecting_reader(unpacking, proceed))
    run(main())


def test_edits_of_several_event_loops_are_checked_in_turn(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = AsyncPipeline(Pipeline.from_bundle(pipe.bundle, threads=1))
    unpacking = threading.Event()
    proceed = threading.Event()

    async def edit() -> None:
        with pytest.raises(RequestError, match="it is rejected"):
            await pipeline.generate("red cube", image=make_png(8))

    async def edit_while_another_is_checked() -> None:
        edits = [asyncio.create_task(edit()) for _ in range(2)]
        await asyncio.sleep(0)
        proceed.set()
        await asyncio.gather(*edits)

    monkeypatch.setattr("lantern_rt.edits.read_image", make_rejecting_reader(unpacking, proceed))
    monkeypatch.setattr("lantern_rt.requests.read_image", make_rejecting_reader(unpacking, proceed))
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(run, edit())
        assert unpacking.wait(60)
        run(edit_while_another_is_checked())
        first.result(60)
    run(pipeline.close())


def test_no_image_of_a_rejected_edit_remains_in_memory(pipe: Pipeline) -> None:
    def count_images() -> int:
        # `type`, unlike `isinstance`, reads no attribute of the objects.
        return sum(issubclass(type(item), Image.Image) for item in gc.get_objects())

    async def main() -> None:
        async with AsyncPipeline(Pipeline.from_bundle(pipe.bundle, threads=1)) as pipeline:
            await pipeline.generate("red cube", method="ar")
            before = count_images()
            gc.disable()  # memory must be freed without it
            try:
                for _ in range(3):
                    with pytest.raises(RequestError):
                        await pipeline.generate("red cube", image=make_png(64))
                await pipeline.generate("red cube", method="ar")
                assert count_images() <= before
            finally:
                gc.enable()

    run(main())


def test_cancelled_tasks_free_their_places(pipe: Pipeline) -> None:
    async def main() -> None:
        pipeline = AsyncPipeline(pipe, max_images_per_pass=3)
        rng = random.Random(0)
        expected = pipe("red cube", seed=1).codes[0]

        async def impatient(i: int) -> None:
            async for step in pipeline.stream("green cube", seed=i, num_images=2, method="eagle:tree=chain-3"):
                if rng.random() < 0.3:
                    break
                assert step.total

        for _ in range(3):
            tasks = [asyncio.create_task(impatient(i)) for i in range(8)]
            patient = asyncio.create_task(pipeline.generate("red cube", seed=1))
            await asyncio.sleep(rng.random() * 0.05)
            for task in rng.sample(tasks, 5):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert np.array_equal((await patient).codes[0], expected)
        await asyncio.get_running_loop().run_in_executor(None, wait_until_idle, pipeline.service)
        await asyncio.get_running_loop().run_in_executor(None, pipeline.service.close)

    run(main())
