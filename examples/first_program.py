"""Generate two images of one prompt and save them: `python examples/first_program.py`."""

from __future__ import annotations

from lantern_rt import LanternError, Pipeline


def main() -> None:
    """Generate and save images, and print statistics."""
    with Pipeline.from_bundle("scenes") as pipe:
        result = pipe("a red sphere on sand", seed=1, num_images=2)
    for seed, image in zip(result.seeds, result.images, strict=True):
        image.save(f"sphere-{seed}.png")  # `lantern-rt run --from sphere-1.png` generates it again
    stats = result.stats
    print(f"{stats.method}: {stats.tokens_per_forward_pass:.2f} tokens per forward pass, {stats.seconds:.1f} s")


if __name__ == "__main__":
    try:
        main()
    except LanternError as error:  # its text is one line for the user
        raise SystemExit(str(error)) from error
