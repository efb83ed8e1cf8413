"""From checkpoints to bundles. Imports torch; never imported by the runtime."""
