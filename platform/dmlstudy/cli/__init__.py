"""The command line: names things, holds no logic. Heavy imports wait until a command needs them."""

from dmlstudy.cli import app, claims, models, publishing, results, studies, tables
from dmlstudy.cli.app import main

__all__ = ["GROUPS", "app", "claims", "main", "models", "publishing", "results", "studies", "tables"]

GROUPS = {
    "Prepare": ("init", "families", "options", "validate", "selfcheck"),
    "Run": ("run", "resume", "status", "logs", "stop", "submit", "jobs", "claims"),
    "Look": ("leaderboard", "report", "ui", "relocate", "delete", "prune"),
    "Decide": ("models", "compare", "promote", "rollback"),
    "Use": ("pull", "embed", "index", "retrieve", "serve", "export", "push"),
}
"""The commands as `--help` shows them: in these groups and in this order."""


def _group_commands() -> None:
    named = {
        command.callback.__name__: command for command in app.app.registered_commands if command.callback
    }
    assert named.keys() == {name for names in GROUPS.values() for name in names}
    app.app.registered_commands[:] = [named[name] for names in GROUPS.values() for name in names]
    for group, names in GROUPS.items():
        for name in names:
            named[name].rich_help_panel = group


_group_commands()
