"""Types that llama.cpp quantises models to: a module without its libraries."""

FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "Q6_K": 18}
"""Of ``enum llama_ftype``."""
