"""The store of serial functions in Redis."""
