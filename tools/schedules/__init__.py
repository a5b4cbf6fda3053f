"""Random schedules of faults."""
