"""The languages clients speak: a room each parses it into submissions and writes its answers; beside them what all share."""
