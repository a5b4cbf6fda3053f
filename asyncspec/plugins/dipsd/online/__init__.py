"""Plans of a running cluster: its measurements, requests, decisions, and how plans did. Pure."""
