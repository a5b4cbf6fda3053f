"""``asyncspec plan``: its planners, what they read and what they print."""
