"""Running graphs: ONNX Runtime sessions behind the runtime protocol."""
