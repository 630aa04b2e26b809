"""One file per engine behind one small interface: start, run a job, weigh, stop."""
