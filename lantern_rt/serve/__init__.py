"""HTTP server for bundles: OpenAI's Images API, a live web page and metrics, on top of `AsyncPipeline`."""
