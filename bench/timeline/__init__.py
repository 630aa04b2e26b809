"""Timeline of decode steps across the processes of a real server: an SVG figure and a table."""
