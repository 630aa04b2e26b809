"""Compiled CPU step: a forward pass recorded once and run with one call into C++ per step."""
