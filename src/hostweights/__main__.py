"""``python -m hostweights``."""

from hostweights.cli import main

main()
