"""A bundle behind HTTP: OpenAI's Images API, live pictures, metrics. HTTP knows `AsyncPipeline` and no decoder."""
