"""What a recorded trace says: timeline, spans, segments, answers, critical path. Pure."""
