"""The commit strategies with a lease: claim, run the sink or the handler, commit.

A worker holds a lease on every key that it processes, and commits with the token of its claim.
The strategies without a lease are in `flow/transactional.py`.
"""
