"""What a picture costs: image decoders on every provider that computes in the host's memory, in turns with the CPU's.

    python benchmarks/image_decoder.py scenes bundles/llamagen-b --threads 1
    python benchmarks/image_decoder.py GPT-B                       # LlamaGen's sizes with random weights

Prints milliseconds (medians) by the clock and of the processor, which a busy host changes less; how far pictures are
from the CPU's, of 255 levels; and how many rows of pixels a row of codes changes: decoding only what changed would have
to decode those. Codes are random. `--smoke`: few rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from lantern_rt.bundle.files import Bundle, open_bundle
from lantern_rt.engines.host import import_onnxruntime, processor
from lantern_rt.engines.loader import ImageDecoder, image_decoder
from lantern_rt.engines.ort.providers import DEFAULT_PROVIDER, host_plugins
from lantern_rt.tuning.pictures import difference, levels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="*", default=["scenes"], help="bundles, or names of LlamaGen's sizes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0, help="of every bundle")
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    here, missing = host_plugins(import_onnxruntime())
    print(f"{processor()}; threads: {asked.threads}; not installed: {', '.join(missing) or 'none'}")
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.bundles:
            bundle = opened(name, Path(folder))
            manifest = bundle.manifest
            codes = np.random.default_rng(0).integers(0, manifest.codebook_size, (1, manifest.codes_per_image))
            decoders = {one: image_decoder(bundle, one, asked.threads) for one in (DEFAULT_PROVIDER, *here)}
            pictures = {one: levels(decode(codes)) for one, decode in decoders.items()}
            times = timed(decoders, codes, 0.0 if asked.smoke else asked.seconds)
            changed = reach(decoders[DEFAULT_PROVIDER], codes, manifest.grid_rows)
            print(f"{name}: the first of {manifest.grid_rows} rows of codes changes {changed} rows of pixels", end=" ")
            print(f"of {manifest.image_height}")
            for one, (wall, cpu) in times.items():
                far = difference(pictures[one], pictures[DEFAULT_PROVIDER])
                print(f"  {one:14} {wall:8.1f} ms  {cpu:8.1f} ms of the processor  {far:.3f} levels away")


def opened(name: str, folder: Path) -> Bundle:
    """A bundle by its name, or one of a LlamaGen size."""
    try:
        from random_bundle import SHAPES, random_bundle
    except ImportError:  # without the extra `export`
        return open_bundle(name, verify=False)
    return open_bundle(random_bundle(SHAPES[name], folder / name) if name in SHAPES else name, verify=False)


def timed(decoders: dict[str, ImageDecoder], codes: np.ndarray, seconds: float) -> dict[str, tuple[float, float]]:
    """Milliseconds of a picture by the clock and of the processor: medians of five rounds or more over all."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in decoders}
    end = time.perf_counter() + seconds
    while len(found[DEFAULT_PROVIDER]) < 5 or time.perf_counter() < end:
        for name, decode in decoders.items():
            wall, cpu = time.perf_counter(), time.process_time()
            decode(codes)
            found[name].append((1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)))
    return {
        name: (statistics.median(wall for wall, _ in own), statistics.median(cpu for _, cpu in own))
        for name, own in found.items()
    }


def reach(decode: ImageDecoder, codes: np.ndarray, rows: int) -> int:
    """Up to which row of pixels other codes in the first row of the grid change any."""
    other = codes.copy()
    other[:, : codes.size // rows] = codes[:, -(codes.size // rows) :]
    changed = np.abs(decode(other) - decode(codes)).max(axis=(0, 1, 3)) > 0
    return len(changed) - int(changed[::-1].argmax())


if __name__ == "__main__":
    main()
