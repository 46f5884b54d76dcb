"""The language: values, contracts and pure rules.

Everything else imports from here, and this folder imports only itself.
Nothing in it opens a connection, starts a task or reads a file.
"""
