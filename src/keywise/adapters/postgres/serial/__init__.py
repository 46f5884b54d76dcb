"""The stores of serial functions in PostgreSQL."""
