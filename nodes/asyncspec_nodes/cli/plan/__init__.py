"""``asyncspec plan``: who is verified together when many users draft for one target."""
