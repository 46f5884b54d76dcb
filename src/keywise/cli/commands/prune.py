"""`keywise prune`: makes the ledger forget keys that no delivery can reach any more."""

from keywise.cli.admin_options import AdminOptions, perform
from keywise.cli.options import grouped
from keywise.cli.output import count, duration, print_result
from keywise.operate.admin import PipelineAdmin


@grouped
def prune(options: AdminOptions) -> None:
    """Forget keys that no delivery can reach any more.

    Needs a retention, as retention="30d" in app.pipeline; with one, workers also prune by themselves.
    Keys with a claim, an unknown write or a suspicion stay.

    \b
    Example:
      keywise prune --app shop:app
    """

    async def act(admin: PipelineAdmin) -> tuple[int, float]:
        return await admin.prune(), admin.pipeline.settings.retention_s or 0.0

    name, (keys, retention_s) = perform(options, act)
    text = f"pruned {count(keys, 'key')} of {name}, older than {duration(retention_s)} and a redelivery"
    print_result({"pipeline": name, "pruned": keys, "retention_s": retention_s}, text, json=options.json)
