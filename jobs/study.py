"""What ``dmlstudy submit`` runs on the cluster: the study, on the Ray that runs this job."""

from __future__ import annotations

import sys

from dmlstudy.cli import main

sys.argv[1:] = ["run", *sys.argv[1:], "--address", "auto"]
main()
