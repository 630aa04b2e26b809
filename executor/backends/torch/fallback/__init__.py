"""Models that transformers computes, over our KV memory: for architectures that no row of the registry knows.

transformers loads the checkpoint and runs every layer; each layer's attention comes to
`quintet.executor.backends.torch.fallback.attention`, which stores its keys and values in paged memory and attends as
for any other model. So scheduling, sampling, prefix cache and recovery are the same. On a CPU plain linear layers are
multiplied by our kernels as well; what is between is torch's.
"""
