"""``asyncspec chat``: a conversation in the terminal."""
