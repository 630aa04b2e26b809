"""Choice of an engine for each request, by load and by cached prefixes."""
