"""Degraded mode: writing while the ledger cannot be reached.

A write-ahead journal on disk records every key before it is written, so that the keys can be repaired later.
It is used only with `on_ledger_down="write-anyway"`.
"""
