"""Conversion of PyTorch networks to ONNX graphs."""
