"""What a pipeline owes many users at a time: throughput, time between tokens, fairness, an end."""
