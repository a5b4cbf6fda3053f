"""Programs of others against ``asyncspec serve``, as they are."""
