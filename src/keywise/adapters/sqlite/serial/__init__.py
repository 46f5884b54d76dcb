"""The store of serial functions in SQLite."""
