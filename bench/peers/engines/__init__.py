"""One file per engine with one small interface: start, run a job, weigh, stop."""
