"""The llama.cpp backend: GGUF files, by the low-level bindings of llama-cpp-python."""
