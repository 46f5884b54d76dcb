"""Reindex: reads every row of an origin again while live changes flow, and writes it in place or to another target.

The operator's acts are in `admin.py`, the work of the workers in `worker.py`, `sweep.py` and `beside.py`. How an origin
is read belongs to its adapter, and how a row is written is up to the pipeline, as for any change.
"""
