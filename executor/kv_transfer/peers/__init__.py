"""KV blocks exchanged between servers: server, client and protocol."""
