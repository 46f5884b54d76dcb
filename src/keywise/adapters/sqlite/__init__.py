"""SQLite as source, ledger, sink and store of serial functions."""
