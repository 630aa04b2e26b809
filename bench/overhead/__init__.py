"""Cost of everything but the model, end to end over HTTP on one machine."""
