"""``python -m dmlstudy`` is the command ``dmlstudy``."""

import sys


def main() -> None:
    """Run the command; Ctrl-C while its modules load ends it as it does later."""
    try:
        from dmlstudy.cli import main as command
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
