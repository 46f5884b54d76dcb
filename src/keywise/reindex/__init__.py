"""Reindex: reads every row of an origin again while live changes flow, and writes it in place or to another target.

The operator's acts are in `admin.py`, and the work of the workers is in `worker.py`, `sweep.py` and
`catch_up_stage.py`. Reading an origin is up to its adapter, and writing a row is up to the pipeline, as for any change.
"""
