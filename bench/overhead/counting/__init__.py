"""What the processes that `bench.overhead.opcodes` counts import at their start."""
