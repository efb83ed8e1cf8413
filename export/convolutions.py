"""An image decoder whose convolutions multiply 8-bit integers, and draw the same picture on every kind of processor.

Those that read what an activation function gives, nearly all of the work, have it and what they give rounded to 8 bits
without sign, in a range that `calibrate` finds; kernels to -64 .. 64, with a scale for each output. Two such products
fit the 16 bits in which processors without VNNI add them: with 127, pictures of `scenes` were 1.2 levels of 255 off.
Others read or write what all layers add to, where 8 bits do not suffice. They multiply multiples of powers of two in
float32, so coarse that their sums need no rounding: the last bits of plain ones differ between processors, would round
a few 8-bit numbers otherwise, and those the picture (0.2 levels). The last convolution stays as it is.
"""

from __future__ import annotations

from contextlib import ExitStack
from math import ceil, log2

import numpy as np
import torch
from onnx import NodeProto, helper
from torch import Tensor, nn

from ..engines.contracts import Progress
from .checkpoints.deferred import computed
from .compare import run_module
from .graph.graph_file import GraphFile
from .graph.graphs import Graph
from .graph.precision import quantise
from .progress import silent

_PICTURES = 8  # with 32, pictures of `scenes` were no nearer to those of float32
_SEED = 1  # another one than that of the graph's cases, on which the decoder is then checked
CALIBRATION = f"{_PICTURES} pictures of random codes"  # for the provenance
_EXACT_BITS = 23  # of a sum in float32, without sign

Range = tuple[float, float]  # lowest and highest number, 0 among them


def calibrate(graph: Graph, codes: int, progress: Progress = silent) -> dict[str, tuple[Range, Range]]:
    """What the convolutions of an image decoder read and give, by the names of their kernels.

    Args:
        graph: `vq_decoder`, with its module.
        codes: of its codebook.
        progress: pictures decoded, of how many.
    """
    ranges: dict[str, tuple[Range, Range]] = {}

    def note(name: str, *tensors: Tensor) -> None:
        before = ranges.get(f"{name}.weight", ((0.0, 0.0), (0.0, 0.0)))
        reached = [(float(tensor.min()), float(tensor.max())) for tensor in tensors]
        read, given = [(min(a[0], b[0]), max(a[1], b[1])) for a, b in zip(before, reached, strict=True)]
        ranges[f"{name}.weight"] = read, given

    generator = np.random.default_rng(_SEED)
    _, *grid = next(iter(graph.cases.values()))["codes"].shape
    with ExitStack() as hooks:
        for name, part in graph.module.named_modules():
            if isinstance(part, nn.Conv2d):
                hook = part.register_forward_hook(lambda _, read, given, name=name: note(name, *read, given))
                hooks.callback(hook.remove)
        for done in range(_PICTURES):
            progress("calibrating the image decoder", done, _PICTURES)
            run_module(graph, {"codes": generator.integers(codes, size=(1, *grid))})
        progress("calibrating the image decoder", _PICTURES, _PICTURES)
    return ranges


def quantise_convolutions(plan: GraphFile, ranges: dict[str, tuple[Range, Range]]) -> None:
    """Have all convolutions of a graph but its last compute the same everywhere; ranges: as `calibrate` finds them."""
    nodes = list(plan.model.graph.node)
    convolutions = [node for node in nodes if node.op_type == "Conv"]
    sigmoids = {node.output[0] for node in nodes if node.op_type == "Sigmoid"}
    swishes = {node.output[0] for node in nodes if node.op_type == "Mul" and sigmoids & {*node.input}}
    resized = {node.output[0]: node.input[0] for node in nodes if node.op_type == "Resize"}
    wide = [node.input[0] for node in convolutions if plan.weights[node.input[1]].shape[2:] == (3, 3)]
    doubled = {name: resized[name] for name in wide if name in resized}
    written = plan.model.graph.node
    del written[:]
    for node in nodes:
        if node.op_type != "Conv" or node is convolutions[-1]:
            written.extend([] if node.output[0] in doubled else [node])
            continue
        (source, kernel, bias), (result,) = node.input, node.output
        read, given = ranges[kernel]
        node.input[0] = f"{node.name}.read"
        if source in swishes:
            node.input[1], node.output[0] = f"{kernel}.kernel", f"{node.name}.given"
            if kernel in plan.weights:  # Emu3 uses some twice
                written.append(_integers(plan, kernel))
            written.extend([*_eight_bits(plan, source, node.input[0], read), node])
            written.extend(_eight_bits(plan, node.output[0], result, given))
            continue
        after = _halve(plan, node) if source in doubled else []
        step = _coarsen(plan, kernel, bias, max(map(abs, read)))
        written.extend([*_multiples(plan, doubled.get(source, source), node.input[0], step), node, *after])


def _eight_bits(plan: GraphFile, value: str, name: str, span: Range) -> list[NodeProto]:
    step = (span[1] - span[0]) / 255 or 1.0
    plan.weights[f"{name}.step"] = torch.tensor(step)
    plan.weights[f"{name}.zero"] = torch.tensor(round(-span[0] / step), dtype=torch.uint8)
    parameters, integers = [f"{name}.step", f"{name}.zero"], f"{name}.integers"
    return [
        helper.make_node("QuantizeLinear", [value, *parameters], [integers], f"{name}.round"),
        helper.make_node("DequantizeLinear", [integers, *parameters], [name], f"{name}.widen"),
    ]


def _integers(plan: GraphFile, name: str) -> NodeProto:
    """The node that turns a kernel back, whose integers and scales replace it among the weights."""
    weight = computed(plan.weights.pop(name)).float()  # [outputs, inputs, height, width]
    del plan.storages[name]
    integers, scales = quantise(weight.flatten(1).T, "columns")
    plan.weights[f"{name}.int8"] = integers.T.reshape(weight.shape).contiguous()
    plan.weights[f"{name}.scales"] = torch.where(scales[0] > 0, scales[0], 1.0)
    return helper.make_node("DequantizeLinear", [f"{name}.int8", f"{name}.scales"], [f"{name}.kernel"], axis=0)


def _coarsen(plan: GraphFile, kernel: str, bias: str, largest: float) -> float:
    """Round a kernel and a bias to multiples of powers of two; returns the one for what is read, up to `largest`.

    A sum of n products then stays below 2^24 steps if it grows as the root of n: without rounding, it is the same in
    any order.
    """
    weight, added = (computed(plan.weights[name]).float() for name in (kernel, bias))
    bits = int(_EXACT_BITS - log2(weight[0].numel()) / 2)
    step = 2.0 ** (ceil(log2(largest or 1.0)) - (bits - bits // 2))
    least = torch.maximum(weight.abs().amax((1, 2, 3)) / 2 ** (bits // 2), added.abs() / (step * 2**_EXACT_BITS))
    steps = torch.exp2(torch.where(least > 0, least, 1.0).log2().ceil())  # [outputs]
    each = steps.view(-1, 1, 1, 1)
    plan.weights[kernel] = (weight / each).round() * each
    plan.weights[bias] = (added / (step * steps)).round() * step * steps
    return step


def _multiples(plan: GraphFile, value: str, name: str, step: float) -> list[NodeProto]:
    plan.weights[f"{name}.step"] = torch.tensor(step)
    return [
        helper.make_node("Div", [value, f"{name}.step"], [f"{name}.steps"], f"{name}.divide"),
        helper.make_node("Round", [f"{name}.steps"], [f"{name}.rounded"], f"{name}.round"),
        helper.make_node("Mul", [f"{name}.rounded", f"{name}.step"], [name], f"{name}.widen"),
    ]


def _halve(plan: GraphFile, node: NodeProto) -> list[NodeProto]:
    """Have a 3 x 3 convolution of a picture in twice its size read the picture itself; returns the nodes behind it.

    Each of a pixel's four copies sees two by two different ones: 16 products instead of 36. The convolution makes all
    four, at the corners of pixels, from the lower right one on; what lies outside the picture is cut off.
    """
    (_, kernel, bias), (result,) = node.input, node.output
    quarters = [computed(plan.weights[kernel]).float()]
    for axis in (2, 3):
        taps = [part.chunk(3, axis) for part in quarters]
        pairs = [pair for a, b, c in taps for pair in ((a + b, c), (a, b + c))]
        quarters = [torch.cat(pair, axis) for pair in pairs]
    plan.weights[kernel], plan.weights[bias] = torch.cat(quarters), computed(plan.weights[bias]).repeat(4)
    next(one for one in node.attribute if one.name == "kernel_shape").ints[:] = [2, 2]
    node.output[0] = f"{kernel}.corners"
    cut = {"first": [1, 1], "end": [-1, -1], "axes": [2, 3]}
    plan.weights |= {f"{kernel}.{name}": torch.tensor(numbers) for name, numbers in cut.items()}
    larger = f"{kernel}.larger"
    return [
        helper.make_node("DepthToSpace", [node.output[0]], [larger], f"{kernel}.enlarge", blocksize=2),
        helper.make_node("Slice", [larger, *(f"{kernel}.{name}" for name in cut)], [result], f"{kernel}.cut"),
    ]
