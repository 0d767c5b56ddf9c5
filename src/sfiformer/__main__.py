"""`python -m sfiformer` is the command `sfi`."""

from sfiformer.cli import main

if __name__ == "__main__":
    main()
