"""Readers: from the card of one lineage's models to their spec. What they share is in
`quintet.executor.model_config.families.shape`.
"""
