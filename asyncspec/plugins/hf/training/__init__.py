"""Training of draft heads on what a target computed of its own texts."""
