"""ONNX Runtime backend: execution providers, sessions, engines and device memory."""
