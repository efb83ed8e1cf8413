"""Building and running TensorRT engines."""
