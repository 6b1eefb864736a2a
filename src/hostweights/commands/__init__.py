"""Subcommands of ``hostweights``, one a file."""
