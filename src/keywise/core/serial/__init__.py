"""Values, contract and rules of serial functions, without input or output.

The stores in `adapters/` run these steps on their rows; `serial/` calls the stores.
The functions that people decorate are not here.
"""
