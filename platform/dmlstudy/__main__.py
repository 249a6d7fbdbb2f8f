"""``python -m dmlstudy`` is the command ``dmlstudy``."""

from dmlstudy.cli import main

main()
