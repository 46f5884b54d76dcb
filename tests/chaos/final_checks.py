"""Goes over the log of a run and says what went wrong: applied twice, lost, older after newer."""

import msgspec


class Evidence(msgspec.Struct, frozen=True):
    """What a run has left to be judged."""

    log: list[tuple[str, int | None, str, int | None]] = []
    """Key, version, what was done (write, delete, mark, tombstone), and how often the key had become suspect by then;
    what was done to one key in the order of its doing, effects before the mark of the same transaction."""
    takeovers: list[tuple[str, int, int]] = []
    """Key, and how often it had become suspect, before and after."""
    content: dict[str, int] = {}
    """What the table shows."""
    truth: dict[str, int] = {}
    """What it should show."""
    newest: dict[str, int] = {}
    """The newest version that was sent of each key, deletions included."""
    marks: dict[str, int] | None = None
    """The marks at the end, where the log does not tell them."""


UNSEEN = -1
"""Instead of a number of suspicions: whoever should have looked was killed before."""


class Verdict(msgspec.Struct):
    """What the log of a run shows."""

    writes: int = 0
    repeated: int = 0
    """Written again at the same version; only an atomic sink promises that it never happens."""
    takeovers: int = 0
    unseen: int = 0
    """Older writes after newer ones, of which nobody can tell whether their keys were suspect."""
    twice: list[str] = []
    lost: list[str] = []
    backwards: list[str] = []
    unsuspected: list[str] = []
    """Takeovers that did not make their key suspect."""

    @property
    def faults(self) -> list[str]:
        return [*self.twice, *self.lost, *self.backwards, *self.unsuspected]


class Story(msgspec.Struct):
    """What has happened to one key so far."""

    marked: int = 0
    written: int = 0
    """The newest that was ever in the store, deletions included."""
    pending: list[int | None] = []
    """Effects since the last mark."""


def judge_atomic(evidence: Evidence) -> Verdict:
    """Each effect is followed by its own mark, marks only rise, and the store ends like the truth."""
    verdict, stories = Verdict(), dict[str, Story]()
    for key, version, op, _ in evidence.log:
        story = stories.setdefault(key, Story())
        if op in ("write", "delete"):
            verdict.writes += 1
            story.pending.append(version)
            if len(story.pending) > 1:
                verdict.twice.append(f"{key}: {len(story.pending)} effects before one mark, the last of {version}")
        else:
            _judge_mark(verdict, story, key, version, op)
            if op == "mark" and story.pending != [version]:
                verdict.lost.append(f"{key}: version {version} was marked, and {story.pending} written")
            if op == "tombstone" and story.pending not in ([], [None]):
                verdict.lost.append(f"{key}: tombstone {version} was marked, and {story.pending} written")
            story.pending = []
    unmarked = (f"{key}: {story.pending} without a mark" for key, story in stories.items() if story.pending)
    verdict.twice += unmarked
    _judge_end(verdict, evidence, stories)
    return verdict


def judge_plain(evidence: Evidence) -> Verdict:
    """Writes may repeat; an older one follows a newer one only on a suspect key; what is marked was written."""
    verdict, stories = Verdict(), dict[str, Story]()
    for key, version, op, suspect in evidence.log:
        if version is None:
            continue  # The handler has logged its deletion, whether there was something to delete or not.
        story = stories.setdefault(key, Story())
        if op in ("write", "delete"):
            verdict.writes += 1
            if version == story.written:
                verdict.repeated += 1
            if version < story.written and suspect == UNSEEN:
                verdict.unseen += 1
            if version < story.written and not suspect:
                verdict.backwards.append(f"{key}: version {version} was written after {story.written}")
            story.written = max(version, story.written)
            story.pending.append(version)
        else:
            _judge_mark(verdict, story, key, version, op)
            if version not in story.pending:
                verdict.lost.append(f"{key}: version {version} was marked, and {story.pending} written")
            story.pending = []
    verdict.unsuspected = [
        f"{key}: taken over, suspect {old} → {new}" for key, old, new in evidence.takeovers if new <= old
    ]
    _judge_end(verdict, evidence, stories)
    return verdict


def _judge_mark(verdict: Verdict, story: Story, key: str, version: int, op: str) -> None:
    if version == story.marked:
        verdict.twice.append(f"{key}: {op} {version} came twice")
    if version < story.marked:
        verdict.backwards.append(f"{key}: {op} {version} came after {story.marked}")
    story.marked = max(version, story.marked)


def _judge_end(verdict: Verdict, evidence: Evidence, stories: dict[str, Story]) -> None:
    verdict.takeovers = len(evidence.takeovers)
    content, truth = evidence.content, evidence.truth
    for key in sorted(content.keys() | truth.keys()):
        if content.get(key) != truth.get(key):
            verdict.lost.append(f"{key}: the store shows {content.get(key)}, the truth is {truth.get(key)}")
    told = {key: story.marked for key, story in stories.items()}
    marks = told if evidence.marks is None else evidence.marks
    for key, version in evidence.newest.items():
        marked = marks.get(key)
        if marked != version:
            verdict.lost.append(f"{key}: {version} was sent, {marked} is the newest that was marked")
