"""The server's configuration: the tree, the command line and the YAML file.

All defaults are in `schema.py`. This folder does not import engines or gRPC, so `--help` is fast.
"""
