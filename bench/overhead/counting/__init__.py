"""Start-up import of the processes that `bench.overhead.opcodes` counts."""
