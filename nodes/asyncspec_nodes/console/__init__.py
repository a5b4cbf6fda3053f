"""What all commands share: arguments, standard streams, signals."""
