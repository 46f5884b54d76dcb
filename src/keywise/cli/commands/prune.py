"""`keywise prune`: makes the ledger forget keys that no delivery can reach any more."""

from keywise.cli.admin_options import AdminOptions, OneOption, WhoOption, WhyOption, perform
from keywise.cli.app_loader import AppOption, JsonOption
from keywise.cli.output import count, duration, plain, print_json
from keywise.flow.pipeline import Pipeline
from keywise.operate.admin import PipelineAdmin


def prune(
    app: AppOption = None,
    pipeline: OneOption = None,
    why: WhyOption = "",
    who: WhoOption = "",
    json: JsonOption = False,
) -> None:
    """Forget keys that no delivery can reach any more.

    Needs a retention, as retention="30d" in app.pipeline; with one, workers also prune by themselves.
    Keys with a claim, an unknown write or a suspicion stay.

    \b
    Example:
      keywise prune --app shop:app
    """

    async def act(admin: PipelineAdmin, opened: Pipeline) -> tuple[str, int, float]:
        pruned = await admin.prune()
        return opened.name, pruned, opened.settings.retention_s or 0.0

    name, keys, retention_s = perform(AdminOptions(app, pipeline, why, who), act)
    if json:
        print_json({"pipeline": name, "pruned": keys, "retention_s": retention_s})
    else:
        print(plain(f"pruned {count(keys, 'key')} of {name}, older than {duration(retention_s)} and a redelivery"))
