"""EAGLE heads as token sources: opening published checkpoints, the head itself, its tree.

Only ``tensors``, ``checkpoint`` and what follows them need torch.
"""
