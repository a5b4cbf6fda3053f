"""CPU kernels: linear layers that are independent of the row count, onnxruntime graphs."""
