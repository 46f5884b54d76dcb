"""Handlers: functions of the user as a sink."""
