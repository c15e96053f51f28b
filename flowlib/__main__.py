"""``python -m flowlib``."""

from flowlib.cli import main

if __name__ == "__main__":
    main()
