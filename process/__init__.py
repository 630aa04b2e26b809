"""What every process of a Quintet server runs on: its slot, its inbox and outboxes, its log, recording and trace.

Moves the messages of `quintet.wire` and knows what none of them means, but for those that a slot needs itself
(`quintet.wire.supervision`). It imports wire, the standard library, msgspec, pyzmq and (for process titles) setproctitle.
"""
