"""What a type checker says about the options of a pipeline; nothing here is run.

mypy warns about an ignore that ignores nothing, so `make check` fails when a mistake below is accepted.
"""

import keywise
from keywise.core.limits import Rate


def accepted(app: keywise.App) -> None:
    app.pipeline("shop", key="id", version="v", deleted={"type": ["gone"]}, rate=Rate(1))
    app.pipeline("shop", key="id", lease="30s", margin=2, retention=None, batch_max=10, history="all", journal=None)


def refused(app: keywise.App) -> None:
    app.pipeline("shop", key="id", verson="v")  # type: ignore[call-arg]
    app.pipeline("shop", key="id", leese="30s")  # type: ignore[call-arg]
    app.pipeline("shop", key="id", lease_s=30.0)  # type: ignore[call-arg]
    app.pipeline("shop", key="id", lease=None)  # type: ignore[arg-type]
    app.pipeline("shop", key="id", batch_max="10")  # type: ignore[arg-type]
