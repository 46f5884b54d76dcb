"""The tables in PostgreSQL, and how they are set up."""
