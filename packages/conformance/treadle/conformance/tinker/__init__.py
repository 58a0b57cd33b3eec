"""Checks servers of Tinker's HTTP API, with the requests that its SDK makes."""
