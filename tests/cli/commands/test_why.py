"""`keywise why` has words for every answer that a change can get."""

from keywise.cli.commands.why import FORECASTS
from keywise.core.entry import RefusalReason


def test_every_reason_has_a_sentence():
    """Except *forgotten*: the forecast is about a message that is sent now."""
    assert set(FORECASTS) == {"granted", *RefusalReason} - {RefusalReason.FORGOTTEN}
