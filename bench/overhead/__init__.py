"""What everything but the model costs, end to end over HTTP on one machine."""
