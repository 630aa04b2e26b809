"""Card readers, one file per model lineage: from a model card to a spec.

`quintet.executor.model_config.families.shape` has the common parts.
"""
