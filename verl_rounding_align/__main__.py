"""``python -m verl_rounding_align`` is the command ``verl-rounding-align``."""

from .cli import main

if __name__ == "__main__":
    main()
