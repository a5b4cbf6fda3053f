"""``asyncspec train-head``: a draft head for any target."""
