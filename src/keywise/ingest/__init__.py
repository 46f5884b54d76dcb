"""Object ingest: notifications of object stores become changes whose keys are the URIs of the objects.

`dialects/` reads the notifications of each kind of store, `versions.py` orders them, and `keys.py` names the objects.
Stores are read and sinks are written elsewhere; queues are sources in `adapters/`, and `flow/` runs the pipeline.
"""
