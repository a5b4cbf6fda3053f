"""A policy, a token source, a backend and a command in a package of their own."""
