"""The operator's actions: inspect, pause, reset, remove, force, repair, reconcile, replay, and copy a ledger.

An action that writes a key claims it first, and every action that changes something leaves a record in the history.
The command line that calls them is in `cli/`.
"""
