"""The isolation of a program on this machine: bubblewrap, a seccomp filter, and the files it sees.

`bubblewrap` makes the command line, `seccomp` compiles the filter of system calls, `host_files`
chooses what of this machine is shown, `worker` starts one sandboxed interpreter, and `guest` is the
program that runs inside as process 1.
"""
