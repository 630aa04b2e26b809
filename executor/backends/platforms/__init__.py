"""Device platforms: one module per type of device."""
