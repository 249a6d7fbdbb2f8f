"""The command line: names things, holds no logic. Heavy imports wait until a command needs them."""

from dmlstudy.cli import app, models, results, studies, tables
from dmlstudy.cli.app import main

__all__ = ["GROUPS", "app", "main", "models", "results", "studies", "tables"]

GROUPS = {
    "Prepare": ("init", "families", "options", "validate", "selfcheck"),
    "Run": ("run", "resume", "status", "logs", "stop", "submit", "jobs"),
    "Look": ("leaderboard", "report", "curves", "ui", "delete", "prune"),
    "Decide": ("models", "compare", "promote", "rollback"),
    "Use": ("pull", "embed", "index", "retrieve", "serve", "export"),
}
"""The commands as `--help` shows them: in these groups and in this order."""


def _group_commands() -> None:
    places = {name: (group, place) for group, names in GROUPS.items() for place, name in enumerate(names)}
    order = list(GROUPS)

    def place_of(command: object) -> tuple[int, int]:
        group, place = places[command.callback.__name__]  # type: ignore[attr-defined]
        command.rich_help_panel = group  # type: ignore[attr-defined]
        return order.index(group), place

    app.app.registered_commands.sort(key=place_of)


_group_commands()
