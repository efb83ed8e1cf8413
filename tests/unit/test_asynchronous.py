"""`AsyncPipeline`: the images that tasks of an event loop get, cancellation, closing, and checks of edits."""

from __future__ import annotations

import asyncio
import gc
import io
import random
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from idle_service import wait_until_idle
from PIL import Image
from same_results import are_same_results

from lantern_rt import Pipeline, RequestError
from lantern_rt.asynchronous import AsyncPipeline

PROMPTS = ["red cube", "a green sphere", "red sphere on sand", "green cube on snow"]
METHODS = [None, "ar", "eagle:tree=chain-3", "sjd:window=5"]


def run_in_new_loop(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 120))


def test_tasks_get_the_images_of_calls_of_the_pipeline(pipe: Pipeline, tmp_path: Path) -> None:
    async def main() -> None:
        async with await AsyncPipeline.from_bundle(pipe.bundle, threads=1, max_images_per_pass=3) as pipeline:
            requests = [{"prompts": prompt, "seed": i, "method": METHODS[i]} for i, prompt in enumerate(PROMPTS)]
            results = await asyncio.gather(*(pipeline.generate(**request) for request in requests))
            for result, request in zip(results, requests, strict=True):
                alone = pipe(**request)
                assert are_same_results(result, alone)
                assert (result.seeds, result.prompts) == (alone.seeds, alone.prompts)
            steps = [step async for step in pipeline.stream("red cube", seed=5)]
            assert np.array_equal(steps[-1].codes[0], pipe("red cube", seed=5).codes[0])
            assert (await pipeline.image(steps[0], 0)).size == results[0].images[0].size
            with pytest.raises(RequestError, match="magic"):
                await pipeline.generate("red cube", method="magic")
        with pytest.raises(RequestError, match="closed"):
            await pipeline.generate("red cube")

    run_in_new_loop(main())


def test_closing_does_not_wait_for_readers_of_a_stream(pipe: Pipeline) -> None:
    async def main() -> None:
        for drain in (True, False):
            pipeline = AsyncPipeline(Pipeline.from_bundle(pipe.bundle, threads=1), max_images_per_pass=2)
            await pipeline.generate("red cube", method="ar")
            steps = pipeline.stream("green cube", seed=3, method="ar")
            first_step = await anext(steps)
            generating = asyncio.create_task(pipeline.generate("red cube", seed=1, num_images=2, method="ar"))
            await asyncio.sleep(0)  # the request arrives, but may not be checked yet
            await pipeline.close(drain)
            with pytest.raises(RequestError, match="closed"):
                await pipeline.image(first_step, 0)
            if drain:
                assert len((await generating).images) == 2
                assert [step async for step in steps][-1].stats is not None
            else:
                await asyncio.gather(generating, return_exceptions=True)

    run_in_new_loop(main())


def test_after_a_timeout_a_new_request_is_accepted_at_once(pipe: Pipeline) -> None:
    async def main() -> None:
        own_pipe = Pipeline.from_bundle(pipe.bundle, threads=1)
        async with AsyncPipeline(own_pipe, max_images_per_pass=1, max_queued_images=0) as pipeline:
            for timeout in (0.0005, 0.001, 0.002, 0.004, 0.008):
                with suppress(TimeoutError):
                    await asyncio.wait_for(pipeline.generate("red cube", num_images=1, method="ar"), timeout)
            assert (await pipeline.generate("red cube")).images

    run_in_new_loop(main())


def test_a_pipeline_whose_loading_was_cancelled_is_closed(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Pipeline.from_bundle(pipe.bundle, threads=1)
    started = threading.Event()
    proceed = threading.Event()
    earlier_threads = {*threading.enumerate()}

    def load_slowly(*_: object) -> Pipeline:
        started.set()
        assert proceed.wait(60)
        return loaded

    async def main() -> None:
        loading = asyncio.create_task(AsyncPipeline.from_bundle(pipe.bundle, threads=1))
        await asyncio.to_thread(started.wait, 60)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        proceed.set()

    monkeypatch.setattr(Pipeline, "from_bundle", load_slowly)
    run_in_new_loop(main())
    deadline = time.monotonic() + 60
    while new_threads := {*threading.enumerate()} - earlier_threads:  # not joined: one of them may not have started
        assert time.monotonic() < deadline, new_threads
        time.sleep(0.01)
    with pytest.raises(RequestError, match="closed"):
        loaded("red cube")


def test_a_cancelled_call_of_close_still_ends_the_service(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()
    proceed = threading.Event()

    def reject_slowly(*_: object, **__: object) -> None:
        started.set()
        assert proceed.wait(60)
        raise RequestError("the request is rejected", field="prompt")

    async def main() -> None:
        pipeline = AsyncPipeline(Pipeline.from_bundle(pipe.bundle, threads=1))
        monkeypatch.setattr(pipeline.pipeline, "check", reject_slowly)
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

    run_in_new_loop(main())


def test_a_service_survives_the_end_of_an_event_loop(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = AsyncPipeline(Pipeline.from_bundle(pipe.bundle, threads=1))
    listeners: list[Any] = []
    submit = pipeline.service.submit

    def record_listener(listener: Any, *prompts: Any, **options: Any) -> Any:
        listeners.append(listener)
        return submit(listener, *prompts, **options)

    async def start_stream() -> None:
        async with aclosing(pipeline.stream("red cube", num_images=4, method="ar")) as steps:
            await anext(steps)

    monkeypatch.setattr(pipeline.service, "submit", record_listener)
    run_in_new_loop(start_stream())
    listeners[0](RequestError("an error after the end of the event loop", field="prompt"))
    run_in_new_loop(pipeline.close())
    assert not caplog.records


def make_png(side: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


def make_rejecting_reader(unpacking: threading.Event, proceed: threading.Event) -> Callable[..., Image.Image]:
    """Return a stand-in for `read_image` that sets `unpacking`, waits for `proceed`, and rejects the image."""

    def reject_image(name: str, source: bytes, header_only: bool = False) -> Image.Image:
        if header_only:
            return Image.open(io.BytesIO(source))
        unpacking.set()
        assert proceed.wait(60)
        raise RequestError("the request is rejected", field="image")

    return reject_image


def test_edits_of_two_callers_alternate_and_delay_no_text_request(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    unpacking = threading.Event()
    proceed = threading.Event()

    async def main() -> None:
        async with AsyncPipeline(Pipeline.from_bundle(pipe.bundle, threads=1), max_images_per_pass=2) as pipeline:

            async def edit(caller: str) -> None:
                stream = pipeline.stream_updates("red cube", image=make_png(8), caller=caller)
                with pytest.raises(RequestError) as caught:
                    async with aclosing(stream) as updates:
                        await anext(updates)
                order.append(f"{caller} {caught.value.field}")

            edits_of_busy_caller = [asyncio.create_task(edit("busy")) for _ in range(5)]
            await asyncio.to_thread(unpacking.wait, 60)
            edit_of_other_caller = asyncio.create_task(edit("other"))
            assert (await pipeline.generate("red cube", method="ar")).images, "a text request waits for edits"
            proceed.set()
            await asyncio.gather(edit_of_other_caller, *edits_of_busy_caller)
            assert order.index("other image") <= 1
            proceed.clear()
            waiting = [asyncio.create_task(edit("busy")) for _ in range(3)]
            await asyncio.sleep(0)
            closing = asyncio.create_task(pipeline.close(drain=False))
            await asyncio.sleep(0)
            proceed.set()
            await asyncio.gather(closing, *waiting)
            assert "busy pipeline" in order, "waiting edits are rejected without reading their images"

    monkeypatch.setattr("lantern_rt.subjects.image_input.check_supports_edits", lambda manifest: None)
    monkeypatch.setattr("lantern_rt.subjects.image_input.read_image", make_rejecting_reader(unpacking, proceed))
    run_in_new_loop(main())


def test_edits_from_several_event_loops_are_checked_in_turn(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = AsyncPipeline(Pipeline.from_bundle(pipe.bundle, threads=1))
    unpacking = threading.Event()
    proceed = threading.Event()

    async def edit() -> None:
        with pytest.raises(RequestError, match="the request is rejected"):
            await pipeline.generate("red cube", image=make_png(8))

    async def edit_while_another_edit_is_checked() -> None:
        edits = [asyncio.create_task(edit()) for _ in range(2)]
        await asyncio.sleep(0)
        proceed.set()
        await asyncio.gather(*edits)

    monkeypatch.setattr("lantern_rt.subjects.image_input.check_supports_edits", lambda manifest: None)
    monkeypatch.setattr("lantern_rt.subjects.image_input.read_image", make_rejecting_reader(unpacking, proceed))
    with ThreadPoolExecutor(1) as threads:
        first_edit = threads.submit(run_in_new_loop, edit())
        assert unpacking.wait(60)
        run_in_new_loop(edit_while_another_edit_is_checked())
        first_edit.result(60)
    run_in_new_loop(pipeline.close())


def test_no_image_of_a_rejected_edit_remains_in_memory(pipe: Pipeline) -> None:
    def count_images() -> int:
        # `type`, unlike `isinstance`, reads no attribute of the objects.
        return sum(issubclass(type(item), Image.Image) for item in gc.get_objects())

    async def main() -> None:
        async with AsyncPipeline(Pipeline.from_bundle(pipe.bundle, threads=1)) as pipeline:
            await pipeline.generate("red cube", method="ar")
            before = count_images()
            gc.disable()  # memory must be freed without a garbage collection
            try:
                for _ in range(3):
                    with pytest.raises(RequestError):
                        await pipeline.generate("red cube", image=make_png(64))
                await pipeline.generate("red cube", method="ar")
                assert count_images() <= before
            finally:
                gc.enable()

    run_in_new_loop(main())


def test_cancelled_tasks_change_no_other_image(pipe: Pipeline) -> None:
    async def main() -> None:
        pipeline = AsyncPipeline(pipe, max_images_per_pass=3)
        rng = random.Random(0)
        expected = pipe("red cube", seed=1).codes[0]

        async def generate_or_stop(i: int) -> None:
            async for step in pipeline.stream("green cube", seed=i, num_images=2, method="eagle:tree=chain-3"):
                if rng.random() < 0.3:
                    break
                assert step.total

        for _ in range(3):
            tasks = [asyncio.create_task(generate_or_stop(i)) for i in range(8)]
            uncancelled = asyncio.create_task(pipeline.generate("red cube", seed=1))
            await asyncio.sleep(rng.random() * 0.05)
            for task in rng.sample(tasks, 5):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert np.array_equal((await uncancelled).codes[0], expected)
        await asyncio.get_running_loop().run_in_executor(None, wait_until_idle, pipeline.service)
        await asyncio.get_running_loop().run_in_executor(None, pipeline.service.close)

    run_in_new_loop(main())
