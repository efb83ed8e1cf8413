"""Serve a Gradio page that shows images while they are generated.

Start it with `pip install gradio`, then `python examples/gradio_app.py [BUNDLE]`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import gradio
from PIL.Image import Image

from lantern_rt import LanternError, Pipeline

NUM_PREVIEWS = 8  # per image; each preview runs the image decoder


def make_app(pipe: Pipeline) -> gradio.Blocks:
    """Return the page for a pipeline whose bundle takes prompts."""

    def generate(prompt: str, negative_prompt: str, seed: float, quality: str) -> Iterator[tuple[Image, str]]:
        try:
            shown_previews = 0
            steps = pipe.stream(prompt, negative_prompt=negative_prompt, seed=int(seed), quality=quality)
            for step in steps:  # Gradio closes the stream when the user leaves or presses Stop, which ends generation
                if step.stats is not None:
                    speed = f"{step.stats.tokens_per_forward_pass:.2f} tokens per forward pass"
                    yield step.image(0), f"{step.settings.method}: {speed}, {step.stats.seconds:.1f} s"
                elif step.done * NUM_PREVIEWS // step.total > shown_previews:
                    shown_previews = step.done * NUM_PREVIEWS // step.total
                    yield step.image(0), f"{step.done} of {step.total} tokens"
        except LanternError as error:  # its text is one line for the user
            raise gradio.Error(str(error)) from error

    manifest = pipe.bundle.manifest
    with gradio.Blocks(title=manifest.name, analytics_enabled=False) as app:
        with gradio.Row():
            with gradio.Column():
                prompt = gradio.Textbox(label="Prompt")
                negative_prompt = gradio.Textbox(label="Negative prompt", visible=manifest.sampling.uses_guidance)
                seed = gradio.Number(value=0, precision=0, minimum=0, label="Seed")
                quality = gradio.Dropdown([*manifest.presets], value="strict", label="Quality")
                generate_button = gradio.Button("Generate", variant="primary")
                stop_button = gradio.Button("Stop")
            with gradio.Column():
                image = gradio.Image(format="png", label="Image", interactive=False)
                statistics = gradio.Textbox(label="Statistics", interactive=False)
        inputs = [prompt, negative_prompt, seed, quality]
        generation = generate_button.click(generate, inputs, [image, statistics], api_name="generate")
        stop_button.click(None, cancels=[generation])
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
