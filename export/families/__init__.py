"""A file a model family: which checkpoints, which prompts, which defaults."""
