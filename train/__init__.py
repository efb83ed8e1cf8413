"""Training of drafters. This package imports PyTorch, so the runtime never imports it."""
