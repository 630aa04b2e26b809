"""Fallback for architectures missing from the model registry: transformers runs the model over our paged KV memory.

transformers loads the checkpoint and runs every layer. Each layer's attention calls
`quintet.executor.backends.torch.fallback.attention`, which uses paged KV memory. So scheduling, sampling, prefix cache and
recovery work as for other models. On a CPU, our kernels also compute plain linear layers; torch computes the rest.
"""
