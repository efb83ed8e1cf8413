"""Building and running plans of TensorRT."""
