"""The simulator of the merge queue: real callers and runners on virtual time, with faults, and its mutants."""
