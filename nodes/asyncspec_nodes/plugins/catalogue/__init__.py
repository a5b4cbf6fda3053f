"""Commands that list what is installed: plug-ins, policies, and the words of a shell."""
