"""A decoder of LlamaGen's sizes in PyTorch, as a baseline for lantern-rt on GPUs.

The modes are `eager`; `graph`, which captures a decoding step as a CUDA graph; and `compiled`, which also compiles the
layers and the output head. Weights are random. The decoder has these common optimizations:

- joint matrix products for queries, keys and values, and for gate and up projections;
- a static KV cache in half precision, and `scaled_dot_product_attention` with a mask over the whole cache;
- guidance and sampling on the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from random_bundle import ModelShape
from torch import Tensor, nn

MODES = ("eager", "graph", "compiled")
ROWS = 2  # one image with guidance
GUIDANCE_SCALE = 4.0
NODES = (2, 16, 64)  # numbers of nodes in a forward pass, each of which is compiled separately


class DecoderLayer(nn.Module):
    def __init__(self, shape: ModelShape, max_length: int) -> None:
        super().__init__()
        width = shape.hidden_size
        self.heads = shape.num_heads
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(width, 1e-5) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, width, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(ROWS, self.heads, max_length, width // self.heads))

    def forward(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        rows, nodes, width = x.shape
        joint = self.qkv(self.attention_norm(x)).view(rows, nodes, 3, self.heads, -1)
        query, key, value = joint.permute(2, 0, 3, 1, 4)
        self.keys.index_copy_(2, positions, apply_rotary_embedding(key, cos, sin))
        self.values.index_copy_(2, positions, value)
        query = apply_rotary_embedding(query, cos, sin)
        attended = F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, nodes, width))
        gate, up = self.up(self.ffn_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def apply_rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first_half, second_half = x.chunk(2, -1)
    return torch.cat([first_half * cos - second_half * sin, second_half * cos + first_half * sin], -1)


class TorchDecoder(nn.Module):
    """A decoder from tokens `[rows, nodes]` and positions `[nodes]` to logits `[rows, nodes, codes]`."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width = shape.hidden_size
        max_length = -(-(shape.grid**2 + NODES[-1]) // 64) * 64
        self.embed = nn.Embedding(shape.codes, width)
        self.head = nn.Linear(width, shape.codes, bias=False)
        self.layers = nn.ModuleList(DecoderLayer(shape, max_length) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(width, 1e-5)
        angles = torch.outer(torch.arange(max_length), 10000.0 ** -torch.linspace(0, 1, width // shape.num_heads // 2))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("causal", torch.ones(max_length, max_length, dtype=torch.bool).tril())

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden_states = self.embed(tokens)
        cos = self.cos[positions]
        sin = self.sin[positions]
        mask = self.causal[positions]
        for layer in self.layers:
            hidden_states = layer(hidden_states, positions, cos, sin, mask)
        return self.compute_logits(hidden_states)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.head(self.norm(hidden_states)).float()


def sample_codes(logits: Tensor) -> Tensor:
    """Sample a code with guidance from the logits of the last node, `[2, nodes, codes]`; return shape `[1]`."""
    conditional, unconditional = logits[:, -1]
    guided = unconditional + GUIDANCE_SCALE * (conditional - unconditional)
    # Exponential noise samples like `torch.multinomial` and can be captured in a CUDA graph.
    return (guided.softmax(-1) / torch.empty_like(guided).exponential_()).argmax(-1, keepdim=True)


def capture_cuda_graph(run: Callable[[], None]) -> Callable[[], None]:
    """Return a function that replays a CUDA graph of `run`."""
    warm_up_stream = torch.cuda.Stream()
    warm_up_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up_stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(warm_up_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@torch.inference_mode()
def measure_decoder(shape: ModelShape, mode: str, device: str, num_images: int = 3) -> dict[str, float]:
    """Measure forward passes at half an image, and plain decoding of codes without pixels.

    Returns:
        Milliseconds of a pass for each number of nodes in `NODES`, and images per second, by label.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = TorchDecoder(shape).eval()
    model.to(torch.float16 if device == "cuda" else torch.float32)
    if mode == "compiled":
        options = {"dynamic": False, "fullgraph": True, "backend": "inductor" if device == "cuda" else "eager"}
        for layer in model.layers:
            layer.compile(**options)
        model.compute_logits = torch.compile(model.compute_logits, **options)

    def capture_if_cuda(run: Callable[[], None]) -> Callable[[], None]:
        return run if mode == "eager" or device == "cpu" else capture_cuda_graph(run)

    def measure_seconds(run: Callable[[], None], repeats: int = 1) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    figures: dict[str, float] = {}
    codes = shape.grid**2
    for nodes in NODES:
        tokens = torch.randint(shape.codes, (ROWS, nodes), device=device)
        positions = torch.arange(codes // 2, codes // 2 + nodes, device=device)
        run = capture_if_cuda(lambda tokens=tokens, positions=positions: model(tokens, positions))
        figures[f"ms, {nodes} nodes"] = 1e3 * statistics.median([measure_seconds(run) for _ in range(24)][4:])
    token = torch.zeros(ROWS, 1, dtype=torch.long, device=device)
    position = torch.zeros(1, dtype=torch.long, device=device)
    image = torch.zeros(codes, dtype=torch.long, device=device)

    def decode_step() -> None:
        code = sample_codes(model(token, position))
        image.index_copy_(0, position, code)
        token.copy_(code.expand_as(token))
        position.add_(1)

    step_once = capture_if_cuda(decode_step)
    costs = []
    for _ in range(1 + num_images):
        token.zero_(), position.zero_()
        costs.append(measure_seconds(step_once, codes))
    figures["images/s"] = 1 / statistics.median(costs[1:])
    return figures
