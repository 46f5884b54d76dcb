"""SQLite as source, ledger, sink, origin and store of serial functions."""
