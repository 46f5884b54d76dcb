"""The ledger in Redis."""
