"""Objects announced on a queue: read in parts, written record by record.

`reader.py` reads one object of an object store in parts, and resumes behind the last one.
Object stores are in `adapters/`, and the running of a pipeline in `flow/`.
"""
