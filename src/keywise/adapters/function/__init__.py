"""Handlers: functions of the user's as sinks."""
