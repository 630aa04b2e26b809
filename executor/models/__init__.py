"""Models: one file per block shape, one registry row per architecture."""
