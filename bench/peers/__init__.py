"""Quintet beside other engines: the same token ids, on the same machine, in turn."""
