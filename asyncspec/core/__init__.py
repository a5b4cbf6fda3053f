"""The pure core: token trees, acceptance, sampling, device jobs, cost model."""
