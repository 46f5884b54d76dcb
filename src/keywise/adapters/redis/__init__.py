"""Redis as ledger and store of serial functions."""
