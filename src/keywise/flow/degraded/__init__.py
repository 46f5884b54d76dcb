"""Writing while the ledger cannot be reached, and putting it right afterwards.

A write-ahead journal names every key before it is written, so that the keys can be repaired later.
It is used only with `on_ledger_down` set to write on.
"""
