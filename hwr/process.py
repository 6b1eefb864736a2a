"""Which process this is, told without a system call: a lease asks for every tensor it hands out."""

import os


def _renew() -> None:
    global token  # one per process, by definition
    token = object()


token: object = object()
"""An object that no other process has: a forked child gets a new one. Read it as ``process.token``."""

os.register_at_fork(after_in_child=_renew)
