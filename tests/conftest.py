"""Settles what holds for every test: hypothesis has no deadline, since a busy machine is not a bug."""

from hypothesis import settings

settings.register_profile("keywise", deadline=None, print_blob=True)
settings.load_profile("keywise")
