"""FastChat worker: a process that connects a Quintet server to a FastChat controller."""
