"""The commonest parts of transformers' models in fewer operations, with the same bits.

A pass of few rows through small layers is mostly Python and dispatch: half the time of two layers
of the bundled model went to reshaping, padding and casting. What is exchanged here is tried against
the family's own code when a shard is loaded (``fit.py``), and stays where one bit differs.
"""
