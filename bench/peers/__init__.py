"""Comparison of Quintet with other engines: the same token ids on the same machine, alternating."""
