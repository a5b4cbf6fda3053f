"""Analysis of traces: timeline, spans, segments, critical path, summary. Pure."""
