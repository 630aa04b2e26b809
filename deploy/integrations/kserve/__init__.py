"""Quintet inside KServe: its runtime, and a predictor of KServe's own protocols."""
