"""Any HTTP service as a sink, and the HTTP client that other adapters share."""
