"""Simulates your handler under faults."""
