"""keywise beside its peers: the same changes, the same handler, the same servers."""
