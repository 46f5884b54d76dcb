"""The running pipeline: source, lanes, claim, sink, commit, settle.

`consumer.py` receives deliveries and starts the workers; `strategy.py` chooses how a batch is committed.
Adapters are in `adapters/`, and the commands of an operator in `operate/`.
"""
