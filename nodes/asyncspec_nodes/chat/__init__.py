"""Conversations: what a chat template says of tools and reasoning, and answers that have them."""
