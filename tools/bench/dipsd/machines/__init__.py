"""DiP-SD at run time on the real machines and the virtual clock, with 4 to 64 users."""
