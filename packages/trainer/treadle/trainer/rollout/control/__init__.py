"""How a person changes the servers of a run while it runs: requests in files of the run directory.

Files work where a socket would not: the run directory may be on a disk that several hosts share.
"""
