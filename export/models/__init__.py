"""PyTorch modules of the networks that are exported."""
