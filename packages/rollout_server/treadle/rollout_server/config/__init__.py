"""The server's configuration: the tree, the command line and the YAML file.

Every default of the server is in `schema.py`. This folder imports no engine and no gRPC, so that
`--help` is fast.
"""
