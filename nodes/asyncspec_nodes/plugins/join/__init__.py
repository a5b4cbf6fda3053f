"""A cluster without a file: machines that join one, and what each of them then runs."""
