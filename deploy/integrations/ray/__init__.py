"""Ray integration: engines in actors for Ray Data and Ray Serve, and multi-host models placed by Ray."""
