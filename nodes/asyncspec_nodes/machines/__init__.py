"""The roles as machines, and two more ways to run them: on a virtual clock, and again."""
