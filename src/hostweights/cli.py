"""The ``hostweights`` command."""


def main() -> None:
    """Entry point."""
