"""Quantization of an image decoder's convolutions, so that every kind of processor decodes the same images.

Convolutions whose input comes from an activation function do nearly all of the work. Their inputs and outputs are
rounded to unsigned 8-bit integers, in ranges measured by `measure_activation_ranges`. Their kernels are rounded to
integers in -64 .. 64, with a scale for each output channel. Larger kernels would overflow on processors without VNNI,
which add two products in 16 bits: with -127 .. 127, images of the model `scenes` differed by 1.2 levels of 255.

The other convolutions read or write the residual stream, for which 8 bits are too few. Their inputs and kernels are
rounded to multiples of powers of two. These are so coarse that float32 adds the products without rounding. Otherwise
processors would differ in the last bits, which changes the rounding of some 8-bit integers and so the image (by 0.2
levels). The last convolution is unchanged.
"""

from __future__ import annotations

from contextlib import ExitStack
from math import ceil, log2

import numpy as np
import torch
from onnx import NodeProto, helper
from torch import Tensor, nn

from ..engines.contracts import Progress
from .checkpoints.deferred import compute_deferred_tensor
from .compare import run_torch_module
from .graph.graph_file import GraphFile
from .graph.graphs import Graph
from .graph.precision import quantize
from .progress import ignore_progress

_NUM_IMAGES = 8  # number of calibration images; with 32, images of `scenes` were not closer to float32's images
_SEED = 1  # differs from the seed of the graph's test cases, on which the decoder is checked afterwards
CALIBRATION = f"{_NUM_IMAGES} pictures of random codes"  # recorded in the provenance
_EXACT_BITS = 23  # maximum bits, without the sign, of sums that are meant to be exact in float32

Range = tuple[float, float]  # lowest number (at most 0) and highest number (at least 0)


def measure_activation_ranges(
    graph: Graph, num_codes: int, progress: Progress = ignore_progress
) -> dict[str, tuple[Range, Range]]:
    """Measure the ranges of inputs and outputs of a decoder's convolutions on random codes, by kernel name."""
    ranges: dict[str, tuple[Range, Range]] = {}

    def extend_ranges(name: str, *tensors: Tensor) -> None:
        before = ranges.get(f"{name}.weight", ((0.0, 0.0), (0.0, 0.0)))
        measured = [(float(tensor.min()), float(tensor.max())) for tensor in tensors]
        inputs, outputs = [(min(a[0], b[0]), max(a[1], b[1])) for a, b in zip(before, measured, strict=True)]
        ranges[f"{name}.weight"] = (inputs, outputs)

    generator = np.random.default_rng(_SEED)
    _, *grid = next(iter(graph.test_cases.values()))["codes"].shape
    with ExitStack() as hooks:
        for name, part in graph.module.named_modules():
            if isinstance(part, nn.Conv2d):
                hook = part.register_forward_hook(
                    lambda _, inputs, output, name=name: extend_ranges(name, *inputs, output)
                )
                hooks.callback(hook.remove)
        for done in range(_NUM_IMAGES):
            progress("calibrating the image decoder", done, _NUM_IMAGES)
            run_torch_module(graph, {"codes": generator.integers(num_codes, size=(1, *grid))})
        progress("calibrating the image decoder", _NUM_IMAGES, _NUM_IMAGES)
    return ranges


def quantize_convolutions(graph_file: GraphFile, activation_ranges: dict[str, tuple[Range, Range]]) -> None:
    """Quantize all convolutions of an image decoder's graph except the last, by `measure_activation_ranges`."""
    nodes = list(graph_file.model.graph.node)
    convolutions = [node for node in nodes if node.op_type == "Conv"]
    sigmoids = {node.output[0] for node in nodes if node.op_type == "Sigmoid"}
    swishes = {node.output[0] for node in nodes if node.op_type == "Mul" and sigmoids & {*node.input}}
    resized = {node.output[0]: node.input[0] for node in nodes if node.op_type == "Resize"}
    inputs_3x3 = [node.input[0] for node in convolutions if graph_file.weights[node.input[1]].shape[2:] == (3, 3)]
    # Convolutions that read an enlarged image read the original image instead; see `_fold_resize_into_conv`.
    doubled = {name: resized[name] for name in inputs_3x3 if name in resized}
    result = graph_file.model.graph.node
    del result[:]
    for node in nodes:
        if node.op_type != "Conv" or node is convolutions[-1]:
            result.extend([] if node.output[0] in doubled else [node])
            continue
        source, kernel = node.input[:2]
        (output,) = node.output
        input_range, output_range = activation_ranges[kernel]
        node.input[0] = f"{node.name}.read"
        if source in swishes:
            node.input[1] = f"{kernel}.kernel"
            node.output[0] = f"{node.name}.given"
            if kernel in graph_file.weights:  # Emu3 uses some kernels twice
                result.append(_quantize_kernel(graph_file, kernel))
            result.extend([*_make_quantize_nodes(graph_file, source, node.input[0], input_range), node])
            result.extend(_make_quantize_nodes(graph_file, node.output[0], output, output_range))
            continue
        after = _fold_resize_into_conv(graph_file, node) if source in doubled else []
        step = _round_kernel_and_bias(graph_file, node, max(map(abs, input_range)))
        result.extend(
            [*_make_step_rounding_nodes(graph_file, doubled.get(source, source), node.input[0], step), node, *after]
        )


def _make_quantize_nodes(
    graph_file: GraphFile, input_name: str, output_name: str, value_range: Range
) -> list[NodeProto]:
    step = (value_range[1] - value_range[0]) / 255 or 1.0
    graph_file.weights[f"{output_name}.step"] = torch.tensor(step)
    graph_file.weights[f"{output_name}.zero"] = torch.tensor(round(-value_range[0] / step), dtype=torch.uint8)
    parameters = [f"{output_name}.step", f"{output_name}.zero"]
    integers = f"{output_name}.integers"
    return [
        helper.make_node("QuantizeLinear", [input_name, *parameters], [integers], f"{output_name}.round"),
        helper.make_node("DequantizeLinear", [integers, *parameters], [output_name], f"{output_name}.widen"),
    ]


def _quantize_kernel(graph_file: GraphFile, kernel_name: str) -> NodeProto:
    """Replace a kernel by integers and scales, and return the node that dequantizes them."""
    weight = compute_deferred_tensor(graph_file.weights.pop(kernel_name)).float()  # [outputs, inputs, height, width]
    del graph_file.storage_types[kernel_name]
    integers, scales = quantize(weight.flatten(1).T, "columns")
    graph_file.weights[f"{kernel_name}.int8"] = integers.T.reshape(weight.shape).contiguous()
    graph_file.weights[f"{kernel_name}.scales"] = torch.where(scales[0] > 0, scales[0], 1.0)
    return helper.make_node(
        "DequantizeLinear", [f"{kernel_name}.int8", f"{kernel_name}.scales"], [f"{kernel_name}.kernel"], axis=0
    )


def _round_kernel_and_bias(graph_file: GraphFile, conv_node: NodeProto, max_input: float) -> float:
    """Round a kernel `[outputs, inputs, height, width]` and its bias, if any, to multiples of powers of two.

    A sum of n products is assumed to grow as the root of n. The sum then stays below 2^24 steps, so float32 adds the
    products exactly, in any sequence. Returns the step, a power of two, to whose multiples inputs must be rounded.
    """
    if len(conv_node.input) == 2:
        conv_node.input.append(f"{conv_node.input[1]}.bias")
        graph_file.weights[conv_node.input[2]] = torch.zeros(len(graph_file.weights[conv_node.input[1]]))
    _, kernel_name, bias_name = conv_node.input
    weight, added = (compute_deferred_tensor(graph_file.weights[name]).float() for name in (kernel_name, bias_name))
    bits = int(_EXACT_BITS - log2(weight[0].numel()) / 2)
    step = 2.0 ** (ceil(log2(max_input or 1.0)) - (bits - bits // 2))
    smallest = torch.maximum(weight.abs().amax((1, 2, 3)) / 2 ** (bits // 2), added.abs() / (step * 2**_EXACT_BITS))
    steps = torch.exp2(torch.where(smallest > 0, smallest, 1.0).log2().ceil())  # [outputs]
    each = steps.view(-1, 1, 1, 1)
    graph_file.weights[kernel_name] = (weight / each).round() * each
    graph_file.weights[bias_name] = (added / (step * steps)).round() * step * steps
    return step


def _make_step_rounding_nodes(
    graph_file: GraphFile, input_name: str, output_name: str, step_size: float
) -> list[NodeProto]:
    graph_file.weights[f"{output_name}.step"] = torch.tensor(step_size)
    return [
        helper.make_node("Div", [input_name, f"{output_name}.step"], [f"{output_name}.steps"], f"{output_name}.divide"),
        helper.make_node("Round", [f"{output_name}.steps"], [f"{output_name}.rounded"], f"{output_name}.round"),
        helper.make_node(
            "Mul", [f"{output_name}.rounded", f"{output_name}.step"], [output_name], f"{output_name}.widen"
        ),
    ]


def _fold_resize_into_conv(graph_file: GraphFile, conv_node: NodeProto) -> list[NodeProto]:
    """Replace a 3 x 3 convolution of an enlarged image by a 2 x 2 convolution of the image before it is enlarged.

    Enlarging copies each pixel to 2 x 2 pixels, so a 3 x 3 kernel covers only 2 x 2 different pixels. The new
    convolution needs 16 products for the four copies instead of 36. Returns the nodes that must follow it: they arrange
    the copies as an enlarged image and cut off a border of one pixel.
    """
    _, kernel, bias = conv_node.input
    (output,) = conv_node.output
    quarters = [compute_deferred_tensor(graph_file.weights[kernel]).float()]
    # One kernel for each of the four copies of a pixel: taps that read the same original pixel are added.
    for axis in (2, 3):
        taps = [part.chunk(3, axis) for part in quarters]
        pairs = [pair for a, b, c in taps for pair in ((a + b, c), (a, b + c))]
        quarters = [torch.cat(pair, axis) for pair in pairs]
    graph_file.weights[kernel] = torch.cat(quarters)
    graph_file.weights[bias] = compute_deferred_tensor(graph_file.weights[bias]).repeat(4)
    next(attribute for attribute in conv_node.attribute if attribute.name == "kernel_shape").ints[:] = [2, 2]
    conv_node.output[0] = f"{kernel}.corners"
    cut = {"first": [1, 1], "end": [-1, -1], "axes": [2, 3]}
    graph_file.weights |= {f"{kernel}.{name}": torch.tensor(numbers) for name, numbers in cut.items()}
    larger = f"{kernel}.larger"
    return [
        helper.make_node("DepthToSpace", [conv_node.output[0]], [larger], f"{kernel}.enlarge", blocksize=2),
        helper.make_node("Slice", [larger, *(f"{kernel}.{name}" for name in cut)], [output], f"{kernel}.cut"),
    ]
