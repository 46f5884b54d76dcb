"""Observers of events: the log, counters, the history, alarms, and the view of a running worker.

The flow emits one event per step and knows none of its observers.
Nothing here decides what happens to a change.
"""
