"""Source, ledger, sink, origin and serial functions in the memory of one process.

They pass the same conformance suites as the others, and are what the simulator runs on.
"""
