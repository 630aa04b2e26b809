"""Tests of the core through its engine."""
