"""One model on several processes of a machine, each with a share of its weights: ``docs/parallel.md``."""
