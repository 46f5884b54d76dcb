"""The live view of a running worker in a terminal."""
