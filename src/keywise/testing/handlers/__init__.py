"""Simulates a handler of the user under faults."""
