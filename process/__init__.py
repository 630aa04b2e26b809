"""Process runtime: slot, inbox and outboxes, log, recording and trace.

It transports the messages of `quintet.wire` and interprets only those of supervision (`quintet.wire.supervision`).
"""
