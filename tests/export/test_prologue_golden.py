"""Prologue, compared with arrays recorded from the published program."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_copies import PROLOGUE, PROLOGUE_CONFIG, PROLOGUE_VQ
from family_readers import read_prologue
from goldens import DATA, GUIDED_TOLERANCE, Arrays, GraphRunner, assert_close, load_golden
from guided_logits import make_sampler
from numpy.typing import NDArray
from safetensors.torch import load_file

from lantern_rt import Pipeline, open_bundle
from lantern_rt.export.compare import GraphFileSession
from lantern_rt.export.families.prologue import _DEFAULT_GUIDANCE, _GUIDANCE
from lantern_rt.export.graph.precision import parse_precisions
from lantern_rt.export.model import BundleContents
from lantern_rt.export.models.decoder import EXCLUDED
from lantern_rt.export.verify import verify_bundle
from lantern_rt.export.writer import export_model
from lantern_rt.methods import Sampling
from lantern_rt.runtime.guidance import Guidance, apply_guidance
from lantern_rt.runtime.raster import RasterLayout
from lantern_rt.subjects.image_files import convert_to_encoder_input

TRACES: dict[str, dict[str, Any]] = {
    trace["name"]: trace for trace in json.loads((DATA / "prologue/traces.json").read_text())
}
POSITIONS = 21  # class, 4 codes of the prologue, end mark, 16 codes of the image without the last
NO_CLASS = 10


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return load_golden("prologue")


@pytest.fixture(scope="module")
def model() -> BundleContents:
    return read_prologue(PROLOGUE, PROLOGUE_VQ, config=PROLOGUE_CONFIG)


class SequenceRunner(GraphRunner):
    """Runner of one sequence that begins with a class id."""

    def __init__(self, bundle: Path, class_id: int) -> None:
        super().__init__(bundle)
        outputs = GraphFileSession(bundle / "condition.onnx").run({"class_ids": np.array([class_id % NO_CLASS])})
        self.prefix = outputs["uncond_embeds" if class_id == NO_CLASS else "prefix_embeds"]
        self.table = np.load(bundle / "code_embeddings.npy")

    def run_after_class(self, ids: NDArray[np.int64]) -> Arrays:
        return self.step(input_embeds=np.concatenate([self.prefix, self.table[ids][None]], 1))


def compute_logits(bundle: Path, class_id: int, ids: list[int]) -> NDArray[np.float32]:
    """Return the logits `[tokens, codes]` that predict each of the ids."""
    logits: NDArray[np.float32] = SequenceRunner(bundle, class_id).run_after_class(np.array(ids[:-1]))["logits"][0]
    return logits


def assert_close_where_allowed(logits: NDArray[np.float32], expected: NDArray[np.float32], **tolerance: float) -> None:
    """Compare logits of codes that are allowed; all others have to be `EXCLUDED`."""
    allowed = np.broadcast_to(load_golden("prologue")["allowed"][: logits.shape[-2]] > 0, logits.shape)
    assert_close(logits[allowed], expected[allowed], **tolerance)
    assert set(logits[~allowed]) == {np.float32(EXCLUDED)}


def test_the_weights_include_the_condition(model: BundleContents, arrays: Arrays) -> None:
    decoder: Any = model.graphs[0].module
    stored = load_file(PROLOGUE / "model.safetensors")
    for i, layer in enumerate(decoder.layers):
        at = f"ar_model.layers.{i}"
        norms = [layer.attention_norm.weight, layer.ffn_norm.weight]
        assert_close(np.stack([norm.numpy() for norm in norms]), arrays["ar_norm_scales"][i])
        outputs = [(layer.attention.out, f"{at}.attn1.proj.weight"), (layer.ffn.down, f"{at}.ffn.fc2.weight")]
        for (linear, name), gate in zip(outputs, arrays["ar_gates"][i], strict=True):
            assert_close((linear.weight + 0).numpy(), gate[:, None] * stored[name].numpy())
    assert_close(decoder.norm.weight.numpy(), arrays["ar_out_scale"])
    weight, bias = (stored[f"ar_model.out_norm.affine.{kind}"].numpy() for kind in ("weight", "bias"))
    assert_close(1 + weight @ arrays["ar_condition"] + bias, arrays["ar_out_scale"])
    assert_close(decoder.rope[:POSITIONS].numpy(), arrays["ar_rope"])


@pytest.mark.parametrize("index", [0, 1])
def test_recorded_tokens_have_the_recorded_logits(prologue_bundle: Path, arrays: Arrays, index: int) -> None:
    class_id = int(arrays["tf_class_ids"][index])
    ids = arrays["tf_tokens"].tolist()
    assert_close_where_allowed(compute_logits(prologue_bundle, class_id, ids), arrays["tf_logits"][index])


def test_the_first_images_rows_have_the_recorded_states_keys_and_values(prologue_bundle: Path, arrays: Arrays) -> None:
    trace = TRACES["run0"]
    for row, class_id in enumerate((trace["class_ids"][0], NO_CLASS)):
        runner = SequenceRunner(prologue_bundle, class_id)
        out = runner.run_after_class(np.array(trace["ids"][0][:-1]))
        inputs = np.concatenate([runner.prefix[0], runner.table[trace["ids"][0][:-1]]])
        assert_close(inputs, arrays["run0_inputs"][row])
        assert_close(out["hidden_states"][0], arrays["run0_normed"][row])
        for part in ("key", "value"):
            new = np.stack([out[f"new_key_values.{i}.{part}"][:, 0] for i in range(3)])  # [layers, nodes, heads, width]
            assert_close(new.transpose(0, 2, 1, 3), arrays[f"run0_{part}s"][:, row])


def test_layers_give_the_recorded_hidden_states(model: BundleContents, arrays: Arrays) -> None:
    decoder: Any = model.graphs[0].module
    x = torch.from_numpy(arrays["run0_inputs"])
    rope = decoder.rope[None, :POSITIONS]
    for i, layer in enumerate(decoder.layers):
        assert_close(x.detach().numpy(), arrays["run0_layer_hidden"][i])
        x, *_ = layer(x, rope)
    assert_close(x.detach().numpy(), arrays["run0_layer_hidden"][-1])


@pytest.mark.parametrize("name", [*TRACES])
def test_runs_choose_the_recorded_tokens(prologue_bundle: Path, arrays: Arrays, name: str) -> None:
    trace = TRACES[name]
    options = trace["options"]
    scales = np.array(trace["scale"] or [1.0] * POSITIONS, np.float32)
    unconditional = trace["scale"] is not None
    for i, (class_id, ids) in enumerate(zip(trace["class_ids"], trace["ids"], strict=True)):
        rows = [class_id, NO_CLASS] if unconditional else [class_id]
        logits = np.stack([compute_logits(prologue_bundle, row, ids) for row in rows])
        for row_logits, row in zip(logits, ("cond", "uncond"), strict=False):
            if f"{name}_{row}_logits" in arrays:
                assert_close_where_allowed(row_logits, arrays[f"{name}_{row}_logits"][i])
        guided = apply_guidance(logits, scales) if unconditional else logits[0]
        if f"{name}_used_logits" in arrays:
            assert_close_where_allowed(guided, arrays[f"{name}_used_logits"][i], tolerance=GUIDED_TOLERANCE)
        if not trace["sample"]:
            first = len(trace.get("fixed_prologue", []))
            assert guided.argmax(-1).tolist()[first:] == ids[first:]
            continue
        filters = {"top_k": options["topK"] or 0, "top_p": options["topP"] or 1.0}
        for position, token in enumerate(ids):
            is_prologue = position < 4
            temperature = options["semantic_temperature" if is_prologue else "temperature"] or options["temperature"]
            sampler = make_sampler(Sampling(temperature=temperature, **filters))
            sums = sampler.compute_distribution(guided[position]).cumsum()
            assert (sums / sums[-1] <= trace["uniform"][i][position]).sum() == token


def test_a_draft_tree_has_the_recorded_logits(prologue_bundle: Path, arrays: Arrays) -> None:
    parents = arrays["tree_parents"]
    assert arrays["tree_depth"].tolist() == [0 if p < 0 else arrays["tree_depth"][p] + 1 for p in parents]
    positions = arrays["tree_position_ids"]
    for row, class_id in enumerate(arrays["tf_class_ids"].tolist()):
        runner = SequenceRunner(prologue_bundle, class_id)
        runner.run_after_class(arrays["tree_before"])
        assert positions.tolist() == (runner.length + arrays["tree_depth"]).tolist()
        embeds = runner.table[arrays["tree_tokens"]][None]
        out = runner.step(input_embeds=embeds, positions=positions, visible=arrays["tree_mask"] > 0)
        allowed = arrays["allowed"][positions] > 0
        assert_close(out["logits"][0][allowed], arrays["tree_logits"][row][allowed])


@pytest.mark.parametrize(
    "choice",
    [
        {"target": "int8"},
        {"target": "int8-weights"},
        {"target": "int4-weights"},
        {"compute": "float16", "vq": "fp16"},
        {"compute": "bfloat16"},
        {"vq": "int8"},
    ],
    ids=lambda choice: "-".join(choice.values()),
)
def test_exact_methods_agree_in_every_precision(tmp_path: Path, model: BundleContents, choice: dict[str, str]) -> None:
    bundle = open_bundle(export_model(model, tmp_path / "bundle", precisions=parse_precisions(**choice)))
    assert verify_bundle(bundle).passed
    with Pipeline.from_bundle(bundle, threads=1) as pipe:
        codes, windows = (
            [codes.tolist() for codes in pipe(class_ids=[1, 2, 3, 4], seed=5, method=method).codes]
            for method in ("ar", "sjd")
        )
    assert codes == windows
    assert all(code < 96 for image in codes for code in image[5:])


def test_schedules_have_the_scales_of_the_published_program(arrays: Arrays) -> None:
    published = [_GUIDANCE[16384, width] for width in (768, 1024, 1280)]
    published += [_GUIDANCE[4096, width] for width in (768, 1024)]
    for (scale, first, power), expected in zip(
        [*published, _DEFAULT_GUIDANCE], arrays["schedule_published"], strict=True
    ):
        sampling = Sampling(cfg_scale=scale, cfg_schedule=f"{first}x16,cosine-{power}")
        assert_close(Guidance(sampling, RasterLayout(273)).scales(range(273)), expected)


def test_the_recorded_runs_have_the_scales_of_schedules() -> None:
    schedules = {"run0": (2.25, "0.7x4,cosine-0.225"), "run2": (4.0, "cosine-1.75"), "run3": (3.0, "constant")}
    for name, (scale, schedule) in schedules.items():
        guidance = Guidance(Sampling(cfg_scale=scale, cfg_schedule=schedule), RasterLayout(POSITIONS))
        assert_close(guidance.scales(range(POSITIONS)), np.array(TRACES[name]["scale"], np.float32), 1e-6)


@pytest.mark.parametrize("averaged", [True, False], ids=["averaged", "last"])
def test_codes_decode_to_the_recorded_images(tmp_path: Path, arrays: Arrays, averaged: bool) -> None:
    folder = Path(shutil.copytree(PROLOGUE_VQ, tmp_path / "vq"))
    if not averaged:
        shutil.copy(folder / "model.safetensors", folder / "model_2.safetensors")
        shutil.copy(folder / "model_1.safetensors", folder / "model_3.safetensors")
    decoder: Any = read_prologue(PROLOGUE, folder, config=PROLOGUE_CONFIG).graphs[-1].module
    codes = torch.from_numpy(arrays["vq_codes"])
    half_level = np.float32(1 / 255)  # the published program truncates levels
    images = decoder(codes).numpy() + half_level
    assert_close(images.clip(-1, 1) / 2 + 0.5, arrays["vq_decoded" if averaged else "vq_decoded_live"])
    if not averaged:
        return
    images = decoder(torch.tensor(TRACES["run0"]["ids"])[:, 5:]).numpy() + half_level
    assert_close(images.clip(-1, 1) / 2 + 0.5, arrays["run0_image"])
    assert_close(decoder.codebook(codes).numpy(), arrays["vq_code_vectors"])
    x = decoder.input_layer(decoder.codebook(codes))
    for layer, expected in zip(decoder.layers, arrays["vq_layer_hidden"], strict=False):
        assert_close(x[0].numpy(), expected)
        x = layer(x, decoder.rope[None])
    assert_close(x[0].numpy(), arrays["vq_layer_hidden"][-1])
    assert_close(decoder.head(decoder.norm(x)).numpy() + half_level, arrays["vq_patches"])


def test_a_picture_encodes_to_the_recorded_codes(prologue_bundle: Path, arrays: Arrays) -> None:
    picture = convert_to_encoder_input(arrays["vq_image_uint8"])
    outputs = GraphFileSession(prologue_bundle / "vq_encoder.onnx").run({"images": picture})
    prologue, cells = np.split(arrays["vq_encoded"], [4])
    assert outputs["codes"].tolist() == [[*(96 + prologue), 120, *cells]]
    encoder: Any = read_prologue(PROLOGUE, PROLOGUE_VQ, config=PROLOGUE_CONFIG).graphs[-2].module
    hidden: list[torch.Tensor] = []
    for layer in (encoder.to_visual, encoder.to_prologue):
        layer.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    _, latents = encoder(torch.from_numpy(picture))
    assert_close(torch.cat(hidden, 1).numpy(), arrays["vq_encoder_hidden"])
    assert_close(outputs["pre_quant"], latents.numpy())
