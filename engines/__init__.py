"""Engines that run the ONNX graphs of a bundle in ONNX Runtime or TensorRT.

The engines of target and drafter implement the protocol `runtime.engine.Engine`.
"""
