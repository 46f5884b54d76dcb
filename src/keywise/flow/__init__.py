"""One pipeline at work: source, lanes, claim, sink, commit, settle.

`consumer.py` receives and schedules; `strategy.py` says how a batch is committed.
Adapters and operators' commands live elsewhere.
"""
