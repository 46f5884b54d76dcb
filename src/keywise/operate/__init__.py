"""What an operator does: inspect, pause, reset, remove, force, reconcile, replay, copy a ledger.

Each act takes its keys by a claim of its own and leaves a record in the history.
The command line that calls these acts is in `cli/`.
"""
