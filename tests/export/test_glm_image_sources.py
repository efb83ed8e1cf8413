"""Comparisons of GLM-Image's image to image with the class of transformers, with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_copies import GLM_IMAGE, copy_checkpoint
from family_readers import read_glm_image
from PIL import Image
from refusals import catch_error

from lantern_rt import Pipeline
from lantern_rt.errors import CheckpointError, RequestError
from lantern_rt.export.families import glm_image
from lantern_rt.export.graph.precision import parse_precisions
from lantern_rt.export.verify import verify_bundle
from lantern_rt.export.writer import export_model
from lantern_rt.requests import Request

transformers = pytest.importorskip("transformers")
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD  # noqa: E402

PART = "vision_language_encoder"
GRIDS = [(2, 2), (3, 5), (5, 2), (2, 3)]  # rows and columns of the image sizes
PROMPT = "a wooden table in the morning light"
# precision and compute type
PRECISIONS = [("fp16", "float32"), ("bf16-safe", "float32"), ("int8-weights", "float32"), ("int4-weights", "float32")]
PRECISIONS += [("int8", "float32"), (None, "float16"), (None, "bfloat16")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint whose image encoder has two blocks and gives different images different codes."""
    torch.set_num_threads(1)
    folder = shutil.copytree(GLM_IMAGE, tmp_path_factory.mktemp("checkpoint") / "glm")

    def sample_encoder_weights(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if ".blocks.0." in name]:
            weights[name.replace(".blocks.0.", ".blocks.1.")] = weights[name]
        generator = torch.Generator().manual_seed(0)
        for name in sorted(name for name in weights if name.startswith(("model.visual.", "model.vqmodel.quant_"))):
            scale = 0.05 if "patch_embed" in name else 0.3
            weights[name] = (scale * torch.randn(weights[name].shape, generator=generator)).bfloat16()

    copy_checkpoint(
        GLM_IMAGE / PART, folder / PART, sample_encoder_weights, lambda config: config["vision_config"].update(depth=2)
    )
    return folder


def export_with_small_sizes(folder: Path, output: Path, precision: str | None = None, compute: str = "float32") -> Path:
    """Export a checkpoint with the image sizes of `GRIDS`; return the folder of the bundle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glm_image, "list_image_grids", lambda square: GRIDS)
        model = read_glm_image(folder, grid=2)
    return export_model(model, output, precisions=parse_precisions(precision, compute=compute))


@pytest.fixture(scope="module")
def pipe(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return Pipeline.from_bundle(export_with_small_sizes(folder, tmp_path_factory.mktemp("bundle") / "glm"), threads=1)


class TransformersModel:
    """Model and processor of transformers; the image processor uses Pillow instead of torchvision."""

    def __init__(self, folder: Path) -> None:
        from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil
        from transformers.models.glm_image.modeling_glm_image import GlmImageForConditionalGeneration
        from transformers.models.glm_image.processing_glm_image import GlmImageProcessor

        settings = json.loads((folder / "processor/processor_config.json").read_text())["image_processor"]
        del settings["image_processor_type"]
        self.processor = GlmImageProcessor(
            image_processor=GlmImageImageProcessorPil(**settings),
            tokenizer=transformers.AutoTokenizer.from_pretrained(folder / "processor"),
            chat_template=(folder / "processor/chat_template.jinja").read_text(),
        )
        self.model = GlmImageForConditionalGeneration.from_pretrained(folder / PART, dtype=torch.float32).eval()

    @torch.no_grad()
    def generate(self, image: Image.Image, rows: int, columns: int) -> tuple[list[int], list[int], list[int]]:
        """Generate an image greedily from an image and `PROMPT`."""
        content = [{"type": "image", "image": image}, {"type": "text", "text": PROMPT}]
        sizes = {"target_h": 32 * rows, "target_w": 32 * columns}
        inputs = self.processor.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs=sizes,
        )
        features = self.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"][:-1]).pooler_output
        codes = self.model.get_image_tokens(features)
        ids = inputs["input_ids"][0].clone()
        ids[ids == self.model.config.image_token_id] = codes
        # The class stops at the end of the new image.
        tokens = self.model.generate(**inputs, max_new_tokens=rows * columns, do_sample=False)[0, len(ids) :]
        return codes.tolist(), ids.tolist(), tokens.tolist()


@pytest.fixture(scope="module")
def transformers_model(folder: Path) -> TransformersModel:
    return TransformersModel(folder)


def make_source_image(rows: int, columns: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (4 * rows, 4 * columns, 3), np.uint8)
    return Image.fromarray(pixels).resize((32 * columns, 32 * rows), Image.Resampling.BICUBIC)


def get_prompt_ids(request: Request) -> list[int]:
    """Return the token ids of the prompt, with the codes of the source image."""
    (image,) = request.images
    ids: list[int] = image.prefix.cond.inputs["token_ids"][0].tolist()
    return ids


@pytest.mark.parametrize("source_grid", [(2, 2), (3, 5), (5, 2)])
@pytest.mark.parametrize("grid", [(2, 2), (3, 5), (5, 2)])
def test_image_to_image_has_the_greedy_codes_of_transformers(
    pipe: Pipeline, transformers_model: TransformersModel, source_grid: tuple[int, int], grid: tuple[int, int]
) -> None:
    image = make_source_image(*source_grid)
    codes, ids, new_codes = transformers_model.generate(image, *grid)
    assert len(set(codes)) > len(codes) // 4  # the encoder gives different cells different codes
    options: dict[str, Any] = {"image": image, "size": f"{32 * grid[1]}x{32 * grid[0]}", "temperature": 0}
    assert get_prompt_ids(pipe.check(PROMPT, **options)) == ids
    for method in ("ar", "sjd:window=5", f"rows:window={grid[1]}"):
        result = pipe(PROMPT, method=method, **options)
        assert result.codes[0].tolist() == new_codes


@pytest.mark.parametrize(("precision", "compute"), PRECISIONS)
def test_every_precision_encodes_a_source_image_alike(
    folder: Path, pipe: Pipeline, tmp_path: Path, precision: str | None, compute: str
) -> None:
    rounded_pipe = Pipeline.from_bundle(
        export_with_small_sizes(folder, tmp_path / "glm", precision, compute), threads=1
    )
    options: dict[str, Any] = {"image": make_source_image(3, 5), "seed": 5, "method": "ar"}
    assert get_prompt_ids(rounded_pipe.check(PROMPT, **options)) == get_prompt_ids(pipe.check(PROMPT, **options))
    (codes,) = rounded_pipe(PROMPT, **options).codes
    assert codes.shape == (15,)
    assert (codes >= 0).all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glm_image, "list_image_grids", lambda square: GRIDS)
        report = verify_bundle(rounded_pipe.bundle, read_glm_image(folder, grid=2))
    # The limits for integer weights hold for trained models, whose distributions are less sensitive to rounding.
    has_integer_weights = precision is not None and precision.startswith("int")
    assert has_integer_weights or report.passed, report
    report_without_checkpoint = verify_bundle(rounded_pipe.bundle)
    for rows in (report.tensors, report_without_checkpoint.tensors):
        encoder_results = {row["tensor"]: row["passed"] for row in rows if row["graph"] == "vq_encoder"}
        assert encoder_results == {"codes": True, "pre_quant": True}


def test_verify_finds_changed_weights_of_the_image_encoder(folder: Path, pipe: Pipeline, tmp_path: Path) -> None:
    other_checkpoint = shutil.copytree(folder, tmp_path / "other")
    copy_checkpoint(
        folder / PART, other_checkpoint / PART, lambda weights: weights["model.visual.blocks.1.mlp.fc2.bias"].add_(0.5)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glm_image, "list_image_grids", lambda square: GRIDS)
        report = verify_bundle(pipe.bundle, read_glm_image(other_checkpoint, grid=2))
    assert {row["graph"] for row in report.tensors if not row["passed"]} == {"vq_encoder"}


def test_without_an_image_encoder_a_bundle_is_text_to_image(folder: Path, tmp_path: Path) -> None:
    text_checkpoint = shutil.copytree(folder, tmp_path / "text")

    def remove_encoder(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if name.startswith("model.visual.")]:
            del weights[name]

    copy_checkpoint(folder / PART, text_checkpoint / PART, remove_encoder)
    with Pipeline.from_bundle(export_with_small_sizes(text_checkpoint, tmp_path / "bundle"), threads=1) as pipe:
        codes = pipe("a fox", size="64x64", temperature=0).codes[0]
        assert codes.shape == (256 + 4,)  # the small grid of 16 x 16 and the large grid of 2 x 2
        assert "no image encoder" in str(catch_error(RequestError, pipe, "a fox", image=make_source_image(2, 2)))


PROCESSOR = "processor/processor_config.json"
MEAN_AND_STD = {"image_mean": [0.0, 0, 1], "image_std": [1, 1, 2]}


def move_processor_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write processor settings as transformers 4 does, in a file beside the name of the class."""
    (folder / PROCESSOR).write_text(json.dumps({"processor_class": "GlmImageProcessor"}))
    (folder / "processor/preprocessor_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda folder: move_processor_settings(folder, MEAN_AND_STD), [*MEAN_AND_STD.values()]),
        (lambda folder: move_processor_settings(folder, {"image_mean": None}), [OPENAI_CLIP_MEAN, OPENAI_CLIP_STD]),
        (lambda folder: (folder / PROCESSOR).unlink(), [OPENAI_CLIP_MEAN, OPENAI_CLIP_STD]),
    ],
    ids=["transformers 4", "defaults", "no file"],
)
def test_colours_of_source_images_are_normalised_as_in_transformers(
    folder: Path, tmp_path: Path, edit: Any, expected: list[list[float]]
) -> None:
    checkpoint = shutil.copytree(folder, tmp_path / "copy")
    edit(checkpoint)
    (encoder,) = (graph.module for graph in read_glm_image(checkpoint, grid=2).graphs if graph.role == "vq_encoder")
    assert [*encoder.color_stats] == expected


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        (PROCESSOR, lambda c: c["image_processor"].update(image_std=[0.5, 0, 1]), "image_std"),
        *(
            (PROCESSOR, lambda c, name=name, value=value: c["image_processor"].update({name: value}), name)
            for name, value in {
                "do_resize": False,
                "do_rescale": False,
                "do_normalize": False,
                "rescale_factor": 1 / 127.5,
                "resample": 2,
                "patch_size": 14,
                "merge_size": 2,
                "image_mean": [0.5, "0.5", 0.5],
            }.items()
        ),
        (f"{PART}/config.json", lambda c: c["vision_config"].update(num_heads=5), "num_heads"),
        (f"{PART}/config.json", lambda c: c["vision_config"].update(hidden_act="silu"), "hidden_act"),
        (f"{PART}/config.json", lambda c: c.update(image_end_token_id=5000), "image_end_token_id"),
    ],
)
def test_unsupported_image_encoders_are_rejected_by_field(
    folder: Path, tmp_path: Path, name: str, edit: Any, message: str
) -> None:
    checkpoint = shutil.copytree(folder, tmp_path / "copy")
    content = json.loads((checkpoint / name).read_text())
    edit(content)
    (checkpoint / name).write_text(json.dumps(content))
    assert message in str(catch_error(CheckpointError, read_glm_image, checkpoint, grid=2))
