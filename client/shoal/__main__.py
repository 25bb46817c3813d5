"""The entry point of `python -m shoal`, which is the same as `shoal`."""

from shoal._cli import main

if __name__ == "__main__":
    main()
