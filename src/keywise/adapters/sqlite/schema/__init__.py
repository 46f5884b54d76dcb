"""The tables in SQLite, and how they are set up."""
