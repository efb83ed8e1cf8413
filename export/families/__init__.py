"""A file a model family: which checkpoints, which prompts, which defaults; families share the files `common*`."""
