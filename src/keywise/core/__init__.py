"""Values, contracts and pure rules: the vocabulary that all other packages share.

Every other package imports from here; this package imports only itself.
Nothing in it opens a connection, starts a task or reads a file.
"""
