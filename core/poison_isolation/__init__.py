"""Isolation of requests that make the executor fail: bisection of the running requests, then rejection of the culprit."""
