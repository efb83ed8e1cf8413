"""Running graphs with ONNX Runtime."""
