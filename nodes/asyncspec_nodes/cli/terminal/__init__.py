"""What commands print on the terminal and read from it: text for people, or JSON."""
