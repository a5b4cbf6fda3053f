"""The chat page: static files and their routes."""
