"""The reference pages say what the code says: settings, commands, words, the tree, mutants, decisions and links."""

import builtins
import functools
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path, PurePosixPath

import pytest
import typer

from docs.pages import ROOT, Page, make_targets, page, pages
from docs.tree import drawing
from keywise.cli import app as command_line
from keywise.core import errors, events
from keywise.core.entry import Entry, RefusalReason
from keywise.core.settings import SerialSettings, Settings, public_name
from keywise.observe import history
from mutants import MUTANTS
from mutants.moves import MOVES
from mutants.reindex import REINDEX_MUTANTS
from mutants.rows import ROWS
from tidy.tree import expect_none, modules

WORDS = (
    *("key", "version", "order", "pipeline", "Delivery", "Change", "Entry", "mark", "tombstone", "Claim", "intent"),
    *("Outcome", "follower", "lane", "settle", "dead letter", "suspect", "grade", "prune", "journal"),
)
"""Of the design, each with one meaning."""

HELP = {"--help", "-h"}


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows, without the lines below the headings."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not re.fullmatch(r"[|:\- ]+", line)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def row_of(text: str, first: str) -> list[str]:
    return next((row for row in rows(text) if row[0].strip("`| ") == first), [])


def sections(text: str) -> dict[str, str]:
    """The text below each heading of the second level."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def command_faults(text: str) -> list[str]:
    documented, found = sections(text), []
    for name, parameters in commands():
        if name not in documented:
            found.append(f"{name} has no section")
            continue
        told = {word for row in rows(documented[name])[1:] for word in re.findall(r"`([^`]+)`", row[0])}
        found += [f"{name}: {parameter} is missing" for parameter in sorted(parameters - told)]
        found += [f"{name}: there is no {word}" for word in sorted(told - parameters)]
    return found + [f"there is no {name}" for name in documented if name not in dict(commands())]


def commands() -> Iterator[tuple[str, set[str]]]:
    """Every command by its full name, with its arguments and options."""
    yield from _commands("keywise", typer.main.get_command(command_line))


def _commands(name: str, command: object) -> Iterator[tuple[str, set[str]]]:
    parameters = {word for parameter in command.params for word in _spellings(parameter)} - HELP
    children = getattr(command, "commands", {})
    if parameters or not children:
        yield name, parameters
    for child, below in children.items():
        yield from _commands(f"{name} {child}", below)


def _spellings(parameter: object) -> list[str]:
    if parameter.param_type_name == "option":
        return [*parameter.opts, *parameter.secondary_opts]
    return [parameter.metavar or parameter.name.upper()]


def setting_faults(text: str) -> list[str]:
    found = []
    for field in fields(Settings):
        row = row_of(text, public_name(field.name))
        if not row or row[1] != str(field.default) or not row[2:]:
            found.append(f"{public_name(field.name)} has the default {field.default}, the page says {row or 'nothing'}")
    return found + strangers(text, "setting", {public_name(field.name) for field in fields(Settings)})


def serial_setting_faults(text: str) -> list[str]:
    [table] = [part for part in text.split("\n\n") if part.startswith("| serial setting |")]
    told = {row[0].strip("`| "): row[1] for row in rows(table)[1:]}
    known = {public_name(field.name): str(field.default) for field in fields(SerialSettings)}
    return [
        f"{name} is {known.get(name)}, the page says {told.get(name)}"
        for name in known.keys() | told.keys()
        if known.get(name) != told.get(name)
    ]


def error_faults(text: str) -> list[str]:
    kinds = {kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type)}
    found = []
    for name, kind in kinds.items():
        row, base = row_of(text, name), kind.__base__.__name__
        if not row or row[1].strip("`") != base or len(row) != 4:
            found.append(f"{name} is a {base}, the page says {row or 'nothing'}")
    return found + strangers(text, "error", set(kinds))


def strangers(text: str, title: str, known: set[str]) -> list[str]:
    """What the table of this title names first in a row, though the code has no such thing."""
    [table] = [part for part in text.split("\n\n") if part.startswith(f"| {title} |")][:1]
    named = [row[0].strip("`| ") for row in rows(table)[1:]]
    return [f"there is no {title} {name}" for name in named if name not in known]


def event_faults(text: str) -> list[str]:
    found = strangers(text, "event", {kind.__name__ for kind in events.Event.__subclasses__()})
    for kind in events.Event.__subclasses__():
        row, fields_of_kind = row_of(text, kind.__name__), set(kind.__struct_fields__) - {"pipeline"}
        if not row or set(re.findall(r"`(\w+)`", row[-1])) != fields_of_kind:
            found.append(f"{kind.__name__} has the fields {sorted(fields_of_kind)}, the page says {row or 'nothing'}")
    return found


def line_faults(text: str, sources: str) -> list[str]:
    """Lines of the history that only the code knows, or only the page."""
    written = {*re.findall(r'"([a-z ]+)",\s+(?:event\.key|"")', sources), history.ALARM, history.CLEARED}
    written |= set(re.findall(r'record(?:_pause)?\((?:found, )?"([a-z ]+)"', sources))
    written |= set(re.findall(r'^COPIED = "([a-z ]+)"', sources, re.MULTILINE))
    written |= {f"reindex {what}" for what in re.findall(r'self\._change\(\s*"([a-z]+)"', sources)}
    written |= {"applied", "stale", "duplicate", "superseded", "kept removed"}
    [table] = [part for part in text.split("\n\n") if part.startswith("| line |")]
    told = set(re.findall(r"`([a-z ]+)`", " ".join(row[0] for row in rows(table)[1:])))
    found = [f"the line {word} is missing" for word in sorted(written - told)]
    return found + [f"there is no line {word}" for word in sorted(told - written)]


def mutant_faults(text: str) -> list[str]:
    return [
        f"rule {mutant.rule} does not name the mutant {mutant.name!r}"
        for mutant in (*MUTANTS, *REINDEX_MUTANTS, *ROWS, *MOVES)
        if mutant.name not in "|".join(row_of(text, str(mutant.rule))[-1:]).strip("| ").split("; ")
    ]


def place_faults(text: str) -> list[str]:
    """Places of the rules that are not there: files, and names that the file before them does not define."""
    found = []
    for row in rows(sections(text)["The rules"])[1:]:
        defined: set[str] = set()
        for place in re.findall(r"`([^`]+)`", row[2]):
            file = ROOT / "src/keywise" / place
            if place.endswith(".py"):
                defined = names_in(file.read_text("utf-8")) if file.is_file() else set()
                found += [] if file.is_file() else [f"rule {row[0].strip('| ')}: there is no {place}"]
            elif not set(place.split(".")) <= defined:
                found.append(f"rule {row[0].strip('| ')}: the file before it does not define {place}")
    return found


def names_in(source: str) -> set[str]:
    """What a module defines: functions, classes, attributes and constants."""
    known = re.compile(r"(?:def|class) (\w+)|^\s*(\w+)(?::| =)", re.MULTILINE)
    return {name for pair in known.findall(source) for name in pair}


def name_faults(text: str) -> list[str]:
    """Classes and functions that a page names in prose, as `Lanes.take`, `_shed` or `grant()`, and that are nowhere."""
    quoted = re.findall(r"`([^`\n]+)`", "\n".join(line for _, line in Page("", text).prose()))
    shape = re.compile(r"([A-Z][a-z]\w*(?:\.\w+)*|_\w+|\w+(?=\())(?:\(.*\))?")
    named = dict.fromkeys(found[1] for span in quoted if (found := shape.fullmatch(span)))
    known = _names_of_ours() | set(dir(builtins))
    return [f"there is no {name}" for name in named if not set(name.split(".")) <= known]


@functools.cache
def _names_of_ours() -> set[str]:
    return {name for module in modules("src") for name in names_in(module.text)}


def change_faults(text: str) -> list[str]:
    """Files and tests that a page names and that are not there. A file without a folder is anywhere in the project."""
    quoted = " ".join(word for line in text.splitlines() for word in re.findall(r"`([^`]+)`", line))
    paths = re.findall(r"(?<![\w./<>-])(?:[\w.-]+/)*[\w-]+\.(?:py|sql|md|txt|toml)\b|(?<![\w./])tests/[\w/]+", quoted)
    found = [path for path in dict.fromkeys(paths) if not (ROOT / path).exists() and not _is_ours(path)]
    tests = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    names = dict.fromkeys(re.findall(r"(?<![\w/])test_\w+(?!\.py|\w)", quoted))
    missing = [name for name in names if f"def {name}(" not in tests]
    return [f"there is no {name}" for name in (*found, *missing)]


def _is_ours(path: str) -> bool:
    source = ROOT / "src/keywise"
    anywhere = "/" not in path and (any(source.rglob(path)) or any((ROOT / "tests").rglob(path)))
    return anywhere or (source / path).exists()


def link_faults(one: Page) -> list[str]:
    found = []
    for number, line in one.prose():
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            if not target.startswith(("http://", "https://")) and not leads_somewhere(one, target):
                found.append(f"{one.path}:{number}: {target} leads nowhere")
    return found


def leads_somewhere(one: Page, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = ROOT / PurePosixPath(one.path).parent / path if path else ROOT / one.path
    return file.is_file() and (not anchor or anchor in anchors(file))


def anchors(file: Path) -> set[str]:
    """Of the headings, as sites that show Markdown make them."""
    headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def sentence_faults(one: Page) -> list[str]:
    prose = ((n, re.sub(r"`[^`]*`|\*\*[^*]*\*\*", "x", line)) for n, line in one.prose())
    return [
        f"{one.path}:{number}: more than one sentence in a line"
        for number, line in prose
        if not line.startswith(("|", "Date:")) and re.search(r"[a-zx)][.?!] [A-Z]", line)
    ]


def test_every_setting_is_told_with_its_default():
    expect_none(setting_faults(page("docs/reference/settings.md").text))
    expect_none(serial_setting_faults(page("docs/reference/settings.md").text))


def test_every_event_is_told_with_its_fields():
    text = page("docs/reference/events.md").text
    expect_none(event_faults(text))
    assert len(event_faults(text.replace("| `DeadLettered` |", "| `Burned` |"))) == 2
    assert len(event_faults(text.replace("`attempts`, `retry_s`, ", "`retry_s`, "))) == 1


def test_every_line_of_the_history_is_told():
    text = page("docs/reference/events.md").text
    commands_that_record = ("cli/commands/dead.py", "cli/commands/objects.py")
    places = (
        "observe/history.py",
        "operate/admin.py",
        "operate/copy_ledger.py",
        "reindex/admin.py",
        *commands_that_record,
    )
    sources = "\n".join((ROOT / "src/keywise" / place).read_text("utf-8") for place in places)
    expect_none(line_faults(text, sources))
    assert line_faults(text.replace("| `pruned` |", "| `prunes` |"), sources) == [
        "the line pruned is missing",
        "there is no line prunes",
    ]


def test_every_error_is_told_with_what_it_is():
    text = page("docs/reference/errors.md").text
    expect_none(error_faults(text))
    assert len(error_faults(text.replace("| `AdminError` |", "| `FactError` |"))) == 2
    assert len(error_faults(text.replace("| `SettingsError` | a URL", "| `KeywiseError` | a URL"))) == 1


def test_every_command_is_told_with_all_its_options():
    text = page("docs/reference/commands.md").text
    assert len(dict(commands())) > 8
    expect_none(command_faults(text))


def test_every_word_is_in_the_glossary():
    text = page("docs/glossary.md").text
    expect_none(f"{word} is missing" for word in WORDS if not row_of(text, word))


def test_every_mutant_stands_beside_its_rule():
    expect_none(mutant_faults(page("docs/architecture.md").text))


def test_the_places_of_the_rules_exist():
    text = page("docs/architecture.md").text
    expect_none(place_faults(text))
    assert place_faults(text.replace("`Lanes.take`", "`Lanes.rake`")) == [
        "rule 2: the file before it does not define Lanes.rake"
    ]
    assert "rule 2: there is no flow/planes.py" in place_faults(text.replace("`flow/lanes.py`", "`flow/planes.py`"))


@pytest.mark.parametrize("path", ["docs/tour.md", "docs/architecture.md", "docs/guarantees.md", "docs/glossary.md"])
def test_classes_and_functions_in_prose_exist(path: str):
    expect_none(name_faults(page(path).text))


def test_a_name_that_is_gone_is_reported():
    text = "`Lanes.rake`, `GiveBack`, `_shield` and `grand()` are gone; `Lanes.take`, `_shed` and `grant()` are not."
    assert name_faults(text) == [f"there is no {name}" for name in ("Lanes.rake", "GiveBack", "_shield", "grand")]


def test_every_reason_of_a_refusal_is_explained():
    named = {reason for row in rows(sections(page("docs/architecture.md").text)["The protocol"]) for reason in row[:1]}
    explained = {reason.strip("| ") for reasons in named for reason in reasons.split(", ")}
    assert set(RefusalReason) <= explained, f"missing: {', '.join(sorted(set(RefusalReason) - explained))}"


def test_every_field_of_an_entry_is_explained():
    named = {name for row in rows(sections(page("docs/architecture.md").text)["The protocol"]) for name in row[:1]}
    explained = {name for names in named for name in re.findall(r"`(\w+)`", names)}
    fields_of_entry = set(Entry.__struct_fields__)
    assert fields_of_entry <= explained, f"missing: {', '.join(sorted(fields_of_entry - explained))}"


def test_how_to_change_the_code_names_files_and_tests_that_exist():
    text = page("docs/how-to/change-the-code.md").text
    expect_none(change_faults(text))
    assert change_faults("`core/planes.py` and `tests/core` fail `test_nothing_of_the_kind`") == [
        "there is no core/planes.py",
        "there is no test_nothing_of_the_kind",
    ]


def test_the_tree_on_the_page_is_the_tree_of_the_code():
    block = page("docs/architecture.md").blocks()[0]
    assert block.text == drawing(), "run: PYTHONPATH=tests .venv/bin/python -m docs.tree"


def test_every_folder_stands_in_the_import_rule():
    stated = {name for row in rows(sections(page("docs/architecture.md").text)["The import rule"]) for name in row}
    named = set(re.findall(r"`(\w+)", " ".join(stated)))
    folders = {path.parent.name for path in (ROOT / "src/keywise").glob("*/__init__.py")}
    assert folders <= named, f"missing in the import rule: {', '.join(sorted(folders - named))}"


def test_every_decision_is_in_the_index():
    index = page("docs/decisions/README.md").text
    files = sorted(path.name for path in (ROOT / "docs/decisions").glob("0*.md"))
    assert files, "there is no decision"
    expect_none(f"{name} is missing" for name in files if f"({name})" not in index)
    numbers = [name[:4] for name in files]
    assert numbers == [f"{number:04}" for number in range(1, len(files) + 1)], "the numbers have a hole, or one twice"
    titles = [page(f"docs/decisions/{name}").text.partition(".")[0] for name in files]
    assert titles == [f"# {number}" for number in range(1, len(files) + 1)]


@pytest.mark.parametrize("one", [one for one in pages() if "/decisions/0" in one.path], ids=lambda one: one.path)
def test_a_decision_has_context_decision_and_consequences(one: Page):
    assert list(sections(one.text)) == ["Context", "Decision", "Consequences"]


def test_every_page_is_reached_from_the_index():
    index = page("docs/README.md").text
    reached = {target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", index)}
    own = [PurePosixPath(one.path).relative_to("docs").as_posix() for one in pages() if one.path.startswith("docs/")]
    expect_none(
        f"{path} is not in docs/README.md"
        for path in own
        if path not in reached and path != "README.md" and not path.startswith("decisions/0")
    )


def test_links_lead_somewhere():
    expect_none(fault for one in pages() for fault in link_faults(one))


def test_a_line_is_a_sentence():
    expect_none(fault for one in pages() for fault in sentence_faults(one))


def test_make_targets_in_prose_exist():
    named = {(one.path, target) for one in pages() for target in re.findall(r"`make ([a-z]+)`", one.text)}
    assert named
    expect_none(f"{path}: make has no target {target}" for path, target in named if target not in make_targets())


def test_the_page_of_failures_names_every_test_of_them():
    told = re.findall(r"`(test_\d_\w+)`", page("docs/nine-failures.md").text)
    tests = (ROOT / "tests/adapters/test_nine_failures.py").read_text("utf-8")
    assert told == re.findall(r"^def (test_\d_\w+)", tests, re.MULTILINE)
    assert {name.split("_")[1] for name in told} == set("123456789")


def test_what_is_missing_is_reported():
    """Each check notices a page that lost a line."""
    settings, commands_page = page("docs/reference/settings.md").text, page("docs/reference/commands.md").text
    assert len(setting_faults(settings.replace("| 30.0 |", "| 31.0 |"))) == 1
    assert len(setting_faults(settings.replace("| `poll`", "| `pull`"))) == 2
    assert command_faults(commands_page.replace("`--until-empty`", "`--until-full`")) == [
        "keywise run: --until-empty is missing",
        "keywise run: there is no --until-full",
    ]
    assert command_faults(commands_page.replace("## keywise why", "## keywise how")) == [
        "keywise why has no section",
        "there is no keywise how",
    ]
    assert len(mutant_faults(page("docs/architecture.md").text.replace("alone is not alone", "alone"))) == 1
    assert link_faults(Page("docs/a.md", "see [b](b.md), [tour](tour.md#nowhere) and [tour](tour.md)")) == [
        "docs/a.md:1: b.md leads nowhere",
        "docs/a.md:1: tour.md#nowhere leads nowhere",
    ]
    assert len(sentence_faults(Page("a.md", "It is so. And so.\n\n```text\nSo. So.\n```\n"))) == 1
