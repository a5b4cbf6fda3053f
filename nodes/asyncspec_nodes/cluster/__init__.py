"""What a cluster is: its file, its rules, its models, its keys."""
