"""One model over several processes: tensor-parallel ranks, pipeline stages, hosts."""
