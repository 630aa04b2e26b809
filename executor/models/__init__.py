"""Models: one file per kind of block, one registry entry per architecture."""
