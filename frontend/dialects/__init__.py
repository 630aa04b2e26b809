"""The languages clients speak: each file parses one into submissions and writes its answers."""
