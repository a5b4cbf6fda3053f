"""Lean layers as graphs of onnxruntime's, two each, with attention over the tree between them.

A graph's norms and activations round otherwise than a family's own code, so a fused layer has other
bits than the lean one, for all rows alike: equal with and without speculation, and with any cut.
"""
