"""What can go wrong by the user's doing."""


class UserError(Exception):
    """A mistake in the arguments or the corpus; its text says what to change."""
