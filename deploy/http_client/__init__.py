"""HTTP/1.1 client of router, load client, FastChat worker and admin commands: asyncio, keep-alive, streamed bodies."""
