"""Observers of events: the log, counters, the history, alarms, and the figures of a running worker.

The flow emits one event per step and does not know its observers.
Nothing here decides what happens to a change.
"""
