"""KV blocks outside of device memory: host memory, disk, peer servers, shared stores."""
