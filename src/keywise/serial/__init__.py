"""Serial functions: calls that run one at a time per key, across processes.

`function.py` is what `app.serial` returns; `client.py` hands its calls to a store and waits for their answers.
The stores are in `adapters/`, the rules in `core/serial/`.
"""
