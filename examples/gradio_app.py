"""A page with Gradio: `pip install gradio`, then `python examples/gradio_app.py [BUNDLE]`; pictures grow on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import gradio
from PIL.Image import Image

from lantern_rt import LanternError, Pipeline

PREVIEWS = 8  # of a picture on its way; each takes a run of the image decoder


def make_app(pipe: Pipeline) -> gradio.Blocks:
    """The page of a pipeline whose bundle takes prompts."""

    def draw(prompt: str, negative_prompt: str, seed: float, quality: str) -> Iterator[tuple[Image, str]]:
        try:
            shown = 0
            steps = pipe.stream(prompt, negative_prompt=negative_prompt, seed=int(seed), quality=quality)
            for step in steps:  # Gradio closes it when a user leaves or presses Stop, and nothing runs on
                if step.stats is not None:
                    speed = f"{step.stats.tokens_per_forward_pass:.2f} tokens per forward pass"
                    yield step.image(0), f"{step.settings.method}: {speed}, {step.stats.seconds:.1f} s"
                elif step.done * PREVIEWS // step.total > shown:
                    shown = step.done * PREVIEWS // step.total
                    yield step.image(0), f"{step.done} of {step.total} tokens"
        except LanternError as error:  # one line: what was found, what was expected, what to do
            raise gradio.Error(str(error)) from error

    manifest = pipe.bundle.manifest
    with gradio.Blocks(title=manifest.name, analytics_enabled=False) as app:
        with gradio.Row():
            with gradio.Column():
                prompt = gradio.Textbox(label="Prompt")
                negative_prompt = gradio.Textbox(label="Negative prompt", visible=manifest.sampling.guided)
                seed = gradio.Number(value=0, precision=0, minimum=0, label="Seed")
                quality = gradio.Dropdown([*manifest.presets], value="strict", label="Quality")
                button, stop = gradio.Button("Draw", variant="primary"), gradio.Button("Stop")
            with gradio.Column():
                picture = gradio.Image(format="png", label="Picture", interactive=False)
                figures = gradio.Textbox(label="Figures", interactive=False)
        inputs = [prompt, negative_prompt, seed, quality]
        drawing = button.click(draw, inputs, [picture, figures], api_name="draw")
        stop.click(None, cancels=[drawing])
    return app


def main(bundle: str = "scenes") -> None:
    """Serve the page at http://localhost:7860 until Ctrl-C."""
    with Pipeline.from_bundle(bundle) as pipe:
        make_app(pipe).launch()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except LanternError as error:
        raise SystemExit(str(error)) from error
