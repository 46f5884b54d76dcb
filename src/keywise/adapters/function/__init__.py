"""Functions and objects of the user's as sinks and origins."""
