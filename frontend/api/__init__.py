"""Client APIs: request parsing and response formats per API, and their shared parts."""
