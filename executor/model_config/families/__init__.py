"""Card readers, one file per model lineage: from a model card to a spec.

`quintet.executor.model_config.shape` has the common parts.
"""
