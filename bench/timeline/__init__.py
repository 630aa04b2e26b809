"""A picture and an account of decode steps across the processes of a real server."""
