"""Config readers, one file per model lineage: from a config to a spec.

`quintet.executor.model_config.shape` has the common parts.
"""
