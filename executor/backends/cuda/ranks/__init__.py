"""Several GPUs: leader and follower ranks, and their collectives."""
