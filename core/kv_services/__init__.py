"""KV services of the core: admin commands, events, export, tier client."""
