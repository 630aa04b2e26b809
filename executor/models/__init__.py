"""Models: one file per kind of sublayer, one registry entry per architecture."""
