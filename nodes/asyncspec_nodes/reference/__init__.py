"""What ``--check`` compares with: the sequential decoder, and each stage by itself."""
