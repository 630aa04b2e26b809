"""KV memory as numbers: block pools, prefix index and tiers."""
