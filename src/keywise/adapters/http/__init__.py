"""Any HTTP API as a sink, and the client that other adapters share."""
