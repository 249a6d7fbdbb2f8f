"""The command that publishes a model for other libraries."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from dmlstudy.cli.app import DEFAULT_STORE, JsonOption, ServerOption, StoreOption, app, model_at
from dmlstudy.cli.tables import say, show_json


@app.command(
    epilog="Examples: `dmlstudy push birds@champion --to published` ·"
    " `dmlstudy push birds@champion --to hub:me/birds --license mit --dry-run`",
)
def push(
    model: Annotated[str, typer.Argument(help="A registered model, or a folder that was pulled.")],
    to: Annotated[str, typer.Option("--to", help="A folder to make, or hub:OWNER/REPOSITORY.")],
    with_code: Annotated[
        bool,
        typer.Option(
            "--with-code",
            help="For sentence-transformers write code that reads pictures exactly as dmlstudy does; who loads it"
            " passes trust_remote_code=True.",
        ),
    ] = False,
    license: Annotated[
        Optional[str], typer.Option("--license", help="The hub's identifier of its licence, as mit.")
    ] = None,
    public: Annotated[
        bool,
        typer.Option("--public", help="Everybody may see a repository that is made; default: you alone."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Make and compare all files, list them, and keep nothing.")
    ] = False,
    json: JsonOption = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Write a model as timm, transformers and sentence-transformers read it, checked against the model."""
    from dmlstudy.serving.publish import Target, publish, told

    target = Target.of(to)
    with model_at(model, store, tracking_uri) as opened:
        made = publish(opened, target, with_code=with_code, licence=license, is_public=public, is_dry=dry_run)
    if json:
        show_json({"to": str(target), "dry_run": dry_run, **made._asdict()})
        return
    for line in told(made, target, is_dry=dry_run):
        say(line)
