"""Where tensors live: one file per kind of device."""
