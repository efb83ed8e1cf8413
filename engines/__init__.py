"""Engines that run graphs in ONNX Runtime or TensorRT, behind the `Engine` protocol of `runtime`."""
