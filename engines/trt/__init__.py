"""TensorRT backend: building, loading and running of TensorRT engines."""
