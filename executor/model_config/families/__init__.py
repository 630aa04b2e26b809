"""Config readers, one file per group of related models: from a config to a spec.

`quintet.executor.model_config.shape` has the common parts.
"""
