"""What every store of serial functions promises."""
