"""Runs real consumers on virtual time against simulated sources, ledgers and sinks with faults."""
