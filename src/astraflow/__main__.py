"""`python -m astraflow` is the command `astraflow`."""

from astraflow.cli.main import main

if __name__ == "__main__":
    main()
