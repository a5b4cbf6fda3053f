"""A policy, a token source, a backend, a dialect and a command in a package of their own."""
