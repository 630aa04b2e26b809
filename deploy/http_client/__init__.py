"""HTTP/1.1 client of router, load client, FastChat worker, terminal and admin commands: asyncio, keep-alive, streamed bodies."""
