"""The simulator of reindexes: real workers read rows, build targets, swap and roll back under faults."""
