"""The networks in PyTorch."""
