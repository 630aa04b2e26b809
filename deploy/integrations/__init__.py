"""Integrations with platforms: Ray, KServe, FastChat, Triton, Hopsworks, Helm, Kubernetes, systemd, Grafana, Docker."""
