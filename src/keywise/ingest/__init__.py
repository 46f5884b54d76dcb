"""Objects announced on a queue: notifications become changes, and objects are read in parts.

`dialects/` reads the notifications of each kind of store, `versions.py` orders them, `keys.py` names the objects, and
`reader.py` reads one object in parts and resumes behind any of them. Object stores and queues are in `adapters/`, and
`flow/` runs the pipeline.
"""
