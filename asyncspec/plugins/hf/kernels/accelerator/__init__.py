"""Matrix products and captured graphs on GPUs that torch has: CUDA, XPU and MPS."""
