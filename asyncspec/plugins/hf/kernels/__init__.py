"""Matrix products and other kernels, by device."""
