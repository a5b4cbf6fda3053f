"""A table for each family; its template's habits, and those of its models."""
