"""The simulator of object ingest: real consumers read a simulated store whose objects change, with faults."""
