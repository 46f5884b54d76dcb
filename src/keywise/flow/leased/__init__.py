"""The strategy for sinks outside of the ledger's database: claim, call the sink, commit.

A worker holds a lease on every key that it works on, and commits with its token.
The strategies that need no lease are in `flow/transactional.py`.
"""
