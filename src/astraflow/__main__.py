"""`python -m astraflow` is the command `astraflow`."""

from astraflow.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
