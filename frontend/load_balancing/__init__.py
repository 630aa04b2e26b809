"""Engine choice for each request, by load and prefix affinity."""
