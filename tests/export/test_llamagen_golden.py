"""The exported target and condition graphs against numbers of the published implementation."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from llamagen_golden import GUIDED, Arrays, Target, close, condition, golden, greedy, guide, rotary_table


class Family:
    """A bundle with its recorded arrays; how to start a target on its prompts."""

    def __init__(self, bundle: Path, folder: str, inputs: dict[str, str]) -> None:
        self.bundle, self.golden = bundle, golden(folder)
        self.inputs: Arrays = {name: self.golden[array] for name, array in inputs.items()}
        self.images, self.length = self.golden["tokens"].shape
        self.mask = self.golden.get("emb_mask")

    def target(self, guided: bool = True, masked: bool = True) -> Target:
        inputs, mask = dict(self.inputs), self.mask
        if not masked and mask is not None:
            inputs["caption_mask"] = mask = np.ones_like(mask)
        prefix = condition(self.bundle, **inputs)
        if mask is not None and guided:
            mask = np.tile(mask, (2, 1))
        return Target(self.bundle, prefix if guided else prefix[: self.images], mask)

    def tokens(self, copies: int = 2) -> np.ndarray:
        return np.tile(self.golden["tokens"], (copies, 1))


@pytest.fixture(scope="module", params=["c2i", "t2i"], ids="llamagen-{}".format)
def family(request: pytest.FixtureRequest) -> Family:
    inputs = {"c2i": {"class_ids": "class_ids"}, "t2i": {"caption_embeds": "caption_emb", "caption_mask": "emb_mask"}}
    bundle = request.getfixturevalue(f"{request.param}_bundle")
    return Family(bundle, f"llamagen-{request.param}", inputs[request.param])


def test_teacher_forced_logits_and_hidden_states_are_reproduced(family: Family) -> None:
    logits, hidden = family.target().forced(family.tokens())
    close(logits, family.golden["tf_logits"])
    close(hidden, family.golden["tf_hidden"])
    close(guide(logits, 4.0), family.golden["tf_logits_cfg4"], GUIDED)
    close(family.target(guided=False).forced(family.tokens(1))[0], family.golden["tf_logits_nocfg"])


def test_token_by_token_equals_all_tokens_at_once(family: Family) -> None:
    target = family.target()
    steps = [target.step(family.tokens()[:, k : k + 1])[0] for k in range(family.length - 1)]
    close(np.concatenate(steps, 1), family.golden["tf_logits"][:, 1:])


def test_the_prefill_is_reproduced_on_padded_positions_too(t2i_bundle: Path) -> None:
    family = Family(t2i_bundle, "llamagen-t2i", {"caption_embeds": "caption_emb", "caption_mask": "emb_mask"})
    target = family.target()
    close(target.logits, family.golden["prefill_logits"])
    close(target.hidden, family.golden["prefill_hidden"])


def test_without_the_text_mask_the_other_logits_are_reproduced(t2i_bundle: Path) -> None:
    family = Family(t2i_bundle, "llamagen-t2i", {"caption_embeds": "caption_emb", "caption_mask": "emb_mask"})
    close(family.target(masked=False).forced(family.tokens())[0], family.golden["tf_logits_nomask"])


def test_padding_is_zeroed_by_the_condition_graph(t2i_bundle: Path) -> None:
    arrays = golden("llamagen-t2i")
    mask = arrays["emb_mask"]
    noisy = np.where(mask[..., None] > 0, arrays["caption_emb"], np.float32(7))
    found = condition(t2i_bundle, caption_embeds=noisy, caption_mask=mask)
    close(found, condition(t2i_bundle, caption_embeds=arrays["caption_emb"], caption_mask=mask), 0)


@pytest.mark.parametrize(("name", "scale"), [("cfg4", 4.0), ("cfg7_5", 7.5), ("cfg1", None)])
def test_greedy_ids_are_reproduced(family: Family, name: str, scale: float | None) -> None:
    ids, logits = greedy(family.target(guided=scale is not None), family.length, scale)
    np.testing.assert_array_equal(ids, family.golden[f"greedy_ids_{name}"])
    if name == "cfg4":
        close(logits, family.golden["greedy_logits_cfg4"], GUIDED)


def test_greedy_ids_are_reproduced_where_guidance_ends_early(family: Family) -> None:
    guided = int(family.golden["cfg_interval"]) + 2
    ids, logits = greedy(family.target(), family.length, 4.0, guided)
    np.testing.assert_array_equal(ids, family.golden["greedy_ids_cfg4_interval"])
    close(logits, family.golden["greedy_logits_cfg4_interval"], GUIDED)


def test_the_rotary_table_is_in_the_graph_and_ends_in_zeros(family: Family) -> None:
    found = rotary_table(family.bundle / "target.onnx")
    expected = family.golden["rope_table"]
    close(found[: len(expected)], expected, 1e-6)
    assert len(found) >= len(expected) + 10
    assert not found[len(expected) :].any()


def test_opset_and_ir_version_stay_within_what_runtimes_read(t2i_drafter_bundle: Path) -> None:
    for path in t2i_drafter_bundle.glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        assert model.ir_version <= 10
        assert [(o.domain, o.version <= 23) for o in model.opset_import] == [("", True)]
        onnx.checker.check_model(str(path), full_check=True)
