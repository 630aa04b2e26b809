"""LoRA adapters: their files, and their weights by layer."""
