"""Matrix products: rows keep their bits, and wrong products are not used."""

from __future__ import annotations

from tools.mutants.mutant import Mutant

KERNELS: tuple[Mutant, ...] = (
    Mutant(
        "kernel-odd-rows",
        "return computed + -computed % self.row_multiple",
        "return computed",
        "test_odd_rows_are_padded",
    ),
    Mutant(
        "kernel-product-not-compared",
        "if not off.norm() <= _TOLERANCE * usual + least:",
        "if not off.norm() < torch.inf:",
        "test_wrong_products_are_not_used",
    ),
    Mutant(
        "kernel-graph-not-compared",
        "return rowwise and all(close(*pair, tolerance) for pair in zip(got, want, strict=True))",
        "return rowwise",
        "test_wrong_products_are_not_used",
    ),
)
