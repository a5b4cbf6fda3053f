"""Tensor parallelism as Megatron-LM and Galaxy have it: a peer, not a part of the product."""
