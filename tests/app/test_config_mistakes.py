"""Mistakes in a TOML file are told as in Python, with their place and what to write."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import keywise
from app.toml_folder import Folder, folder_in
from keywise import App, Retry
from keywise.core.errors import SettingsError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    return folder_in(tmp_path, monkeypatch)


MISTAKES: dict[str, tuple[Callable[[App], object], str]] = {
    "an unknown setting": (lambda app: app.pipeline("search", key="id", leese="45s"), "key = 'id'\nleese = '45s'"),
    "no key": (lambda app: app.pipeline("search"), ""),
    "an empty key": (lambda app: app.pipeline("search", key=""), "key = ''"),
    "a key that is no text": (lambda app: app.pipeline("search", key=5), "key = 5"),
    "deletions that are no table": (
        lambda app: app.pipeline("search", key="id", deleted=["gone"]),
        "key = 'id'\ndeleted = ['gone']",
    ),
    "deletions that are no list": (
        lambda app: app.pipeline("search", key="id", deleted={"type": "gone"}),
        "key = 'id'\ndeleted = { type = 'gone' }",
    ),
    "a field for two things": (
        lambda app: app.pipeline("search", key="id", version="id"),
        "key = 'id'\nversion = 'id'",
    ),
    "a duration that is none": (
        lambda app: app.pipeline("search", key="id", lease="soon"),
        "key = 'id'\nlease = 'soon'",
    ),
    "a number that is none": (
        lambda app: app.pipeline("search", key="id", batch_max="5"),
        "key = 'id'\nbatch_max = '5'",
    ),
    "settings that contradict": (
        lambda app: app.pipeline("search", key="id", lease="30s", margin="20s"),
        "key = 'id'\nlease = '30s'\nmargin = '20s'",
    ),
    "attempts that are no number": (
        lambda app: app.pipeline("search", key="id", retry=Retry(attempts="5")),
        "key = 'id'\nretry = { attempts = '5' }",
    ),
    "a source that is no URL": (
        lambda app: app.pipeline("search", key="id").source("shop.db"),
        "key = 'id'\nsources = ['shop.db']",
    ),
    "a source twice": (
        lambda app: app.pipeline("search", key="id").source("memory://").source("memory://"),
        "key = 'id'\nsources = ['memory://', { url = 'memory://' }]",
    ),
    "a setting with its unit": (
        lambda app: app.pipeline("search", key="id", lease_s=45),
        "key = 'id'\nlease_s = 45",
    ),
    "a misspelt word": (
        lambda app: app.pipeline("search", key="id", verson="v"),
        "key = 'id'\nverson = 'v'",
    ),
    "an unknown lane": (
        lambda app: app.pipeline("search", key="id").source("memory://", lane="slow"),
        "key = 'id'\nsources = [{ url = 'memory://', lane = 'slow' }]",
    ),
    "a lane that is no text": (
        lambda app: app.pipeline("search", key="id").source("memory://", lane=[1]),
        "key = 'id'\nsources = [{ url = 'memory://', lane = [1] }]",
    ),
    "an unknown history": (
        lambda app: app.pipeline("search", key="id", history=["all"]),
        "key = 'id'\nhistory = ['all']",
    ),
    "a sink that is no URL": (lambda app: app.pipeline("search", key="id").sink("shop"), "key = 'id'\nsink = 'shop'"),
    "an origin that is no URL": (
        lambda app: app.pipeline("search", key="id").origin("shop"),
        "key = 'id'\norigin = 'shop'",
    ),
    "an origin without methods": (
        lambda app: app.pipeline("search", key="id").origin(sys.modules["toml_shop"].lookup),
        "key = 'id'\norigin = 'toml_shop:lookup'",
    ),
    "two targets": (
        lambda app: app.pipeline("search", key="id").sink("memory://").apply(sys.modules["toml_shop"].index),
        "key = 'id'\nsink = 'memory://'\napply = 'toml_shop:index'",
    ),
    "key and read": (
        lambda app: app.pipeline("search", key="id", read=sys.modules["toml_shop"].read),
        "key = 'id'\nread = 'toml_shop:read'",
    ),
    "an async read": (
        lambda app: app.pipeline("search", read=sys.modules["toml_shop"].read_later),
        "read = 'toml_shop:read_later'",
    ),
    "a read whose type nobody knows": (
        lambda app: app.pipeline("search", read=sys.modules["toml_shop"].read_unknown),
        "read = 'toml_shop:read_unknown'",
    ),
    "a read without parameters that can be looked at": (
        lambda app: app.pipeline("search", read=max),
        "read = 'builtins:max'",
    ),
    "a handler whose type nobody knows": (
        lambda app: app.pipeline("search", key="id").apply(sys.modules["toml_shop"].index_unknown),
        "key = 'id'\napply = 'toml_shop:index_unknown'",
    ),
    "a handler without parameters that can be looked at": (
        lambda app: app.pipeline("search", key="id").apply(max),
        "key = 'id'\napply = 'builtins:max'",
    ),
    "a handler without a change": (
        lambda app: app.pipeline("search", key="id").apply(sys.modules["toml_shop"].index_nothing),
        "key = 'id'\napply = 'toml_shop:index_nothing'",
    ),
}


@pytest.mark.parametrize(("mistake", "text"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_told_as_in_python_with_its_place(folder: Folder, mistake: Callable[[App], object], text: str):
    from_file = folder.error(f"ledger = 'memory://'\n[pipeline.search]\n{text}")
    with pytest.raises(SettingsError) as from_python:
        mistake(App("memory://"))
    assert str(from_file) == f"{folder.file}: [pipeline.search]: {from_python.value}"
    assert type(from_file) is type(from_python.value)


LOGS = {"store": "s3://logs", "format": "ndjson"}
IN_LOGS = "store = 's3://logs'\nformat = 'ndjson'\n"
OBJECT_MISTAKES: dict[str, tuple[Callable[[App], object], str]] = {
    "no format": (lambda app: app.objects("logs", store="s3://logs"), "store = 's3://logs'"),
    "an unknown format": (
        lambda app: app.objects("logs", store="s3://logs", format="xml"),
        "store = 's3://logs'\nformat = 'xml'",
    ),
    "a store that is no URL": (
        lambda app: app.objects("logs", store="logs", format="ndjson"),
        "store = 'logs'\nformat = 'ndjson'",
    ),
    "an unknown kind": (lambda app: app.objects("logs", **LOGS, kind="rows"), f"{IN_LOGS}kind = 'rows'"),
    "a part of no records": (lambda app: app.objects("logs", **LOGS, part_records=0), f"{IN_LOGS}part_records = 0"),
    "a lease that is none": (lambda app: app.objects("logs", **LOGS, lease="soon"), f"{IN_LOGS}lease = 'soon'"),
    "a key without an envelope": (lambda app: app.objects("logs", **LOGS, key="id"), f"{IN_LOGS}key = 'id'"),
    "a source without a dialect": (
        lambda app: app.objects("logs", **LOGS).source("memory://"),
        f"{IN_LOGS}sources = ['memory://']",
    ),
    "an unknown dialect": (
        lambda app: app.objects("logs", **LOGS).source("memory://", dialect="azure"),
        f"{IN_LOGS}sources = [{{ url = 'memory://', dialect = 'azure' }}]",
    ),
    "a dialect of another store": (
        lambda app: app.objects("logs", **LOGS).source("memory://", dialect="gcs"),
        f"{IN_LOGS}sources = [{{ url = 'memory://', dialect = 'gcs' }}]",
    ),
    "an origin": (
        lambda app: app.objects("logs", **LOGS).origin("sqlite:///shop.db"),
        f"{IN_LOGS}origin = 'sqlite:///shop.db'",
    ),
    "a handler of single changes": (
        lambda app: app.objects("logs", **LOGS).apply(sys.modules["toml_shop"].index),
        f"{IN_LOGS}apply = 'toml_shop:index'",
    ),
}


@pytest.mark.parametrize(("mistake", "text"), OBJECT_MISTAKES.values(), ids=OBJECT_MISTAKES.keys())
def test_a_mistake_about_objects_is_told_as_in_python(folder: Folder, mistake: Callable[[App], object], text: str):
    from_file = folder.error(f"ledger = 'memory://'\n[objects.logs]\n{text}")
    with pytest.raises(SettingsError) as from_python:
        mistake(App("memory://"))
    assert str(from_file) == f"{folder.file}: [objects.logs]: {from_python.value}"
    assert type(from_file) is type(from_python.value)


OWN_OBJECT_MISTAKES = {
    "no store": ("format = 'ndjson'", '[objects.logs]: store is missing; write for example store = "s3://uploads"'),
    "a store that is no text": ("store = 5\nformat = 'ndjson'", "[objects.logs]: store: 5 is no URL"),
    "a misspelt word": (f"{IN_LOGS}part_record = 5", "unknown setting 'part_record'; did you mean part_records?"),
    "an unknown word of a source": (
        f"{IN_LOGS}sources = [{{ url = 'memory://', dialekt = 's3' }}]",
        "[objects.logs]: sources: unknown setting 'dialekt'; did you mean dialect?",
    ),
    "sources that are no list": (
        f"{IN_LOGS}sources = 'memory://'",
        'write sources = [{ url = "sqlite:///shop.db", dialect = "s3" }]',
    ),
    "a dialect that no module has": (
        f"{IN_LOGS}sources = [{{ url = 'memory://', dialect = 'toml_shop:anounced' }}]",
        "sources: dialect: toml_shop has no function 'anounced'; did you mean toml_shop:announced?",
    ),
    "a format that no module has": (
        "store = 's3://logs'\nformat = 'nowhere:split'",
        "[objects.logs]: format: no module is called 'nowhere'",
    ),
    "objects that are no table": ("[[objects.logs]]", "write [objects.NAME] above it"),
}


@pytest.mark.parametrize(("text", "words"), OWN_OBJECT_MISTAKES.values(), ids=OWN_OBJECT_MISTAKES.keys())
def test_a_mistake_about_objects_is_told_with_its_place(folder: Folder, text: str, words: str):
    table = text if text.startswith("[[") else f"[objects.logs]\n{text}"
    assert words in str(folder.error(f"ledger = 'memory://'\n{table}"))


def test_a_name_belongs_to_one_pipeline_of_both_kinds(folder: Folder):
    text = f"ledger = 'memory://'\n[pipeline.logs]\nkey = 'id'\n[objects.logs]\n{IN_LOGS}"
    assert "[objects.logs]: a pipeline needs a name of its own, and 'logs' is taken" in str(folder.error(text))


def test_a_pipeline_needs_a_name_in_a_file_too(folder: Folder):
    error = folder.error("ledger = 'memory://'\n[pipeline.'']\nkey = 'id'")
    with pytest.raises(SettingsError) as from_python:
        App("memory://").pipeline("", key="id")
    assert str(error) == f'{folder.file}: [pipeline.""]: {from_python.value}'


IN_SEARCH = "ledger = 'memory://'\n[pipeline.search]\nkey = 'id'\n"
OWN_MISTAKES = {
    "no ledger": ("[pipeline.search]\nkey = 'id'", 'there is no ledger; write ledger = "sqlite:///shop.db" at the top'),
    "a ledger that is no text": ("ledger = 5", "ledger: 5 is no URL; write for example"),
    "a ledger that is no URL": ("ledger = 'shop.db'", "shop.db is no URL; write for example sqlite:///shop.db"),
    "an unknown word at the top": ("ledgr = 'memory://'", "unknown setting 'ledgr'; did you mean ledger?"),
    "pipelines": ("ledger = 'memory://'\n[pipelines.a]", "unknown setting 'pipelines'; did you mean pipeline?"),
    "a pipeline without a name": (
        "ledger = 'memory://'\n[pipeline]\nkey = 'id'",
        "pipeline.key is no table; write [pipeline.NAME] above it",
    ),
    "a list of pipelines": (
        "ledger = 'memory://'\n[[pipeline.search]]\nkey = 'id'",
        "pipeline.search is no table; write [pipeline.NAME]",
    ),
    "pipeline as a value": ("ledger = 'memory://'\npipeline = 1", "pipeline is no table; write [pipeline.NAME]"),
    "an unknown word": (
        IN_SEARCH + "source = ['memory://']",
        "[pipeline.search]: unknown setting 'source'; did you mean",
    ),
    "a word like no other": (IN_SEARCH + "xyz = 1", "unknown setting 'xyz'; known are: apply, attempts_max, backoff,"),
    "a parameter's name": (IN_SEARCH + "name = 'a'\nself = 1", "[pipeline.search]: unknown setting 'name'; "),
    "a name with a space": ("ledger = 'memory://'\n[pipeline.'a b']", ": [pipeline.\"a b\"]: pipeline 'a b' needs"),
    "a name without one": ("ledger = 'memory://'\n[pipeline.a-b_1]", ": [pipeline.a-b_1]: pipeline 'a-b_1' needs"),
    "one source without a list": (
        IN_SEARCH + "sources = 'memory://'",
        '[pipeline.search]: sources is no list; write sources = ["sqlite:///shop.db"]',
    ),
    "a source that is a number": (IN_SEARCH + "sources = [1]", "[pipeline.search]: sources: 1 is no URL; write"),
    "a source without a URL": (IN_SEARCH + "sources = [{}]", "[pipeline.search]: sources: url is missing in {}; write"),
    "an unknown word of a source": (
        IN_SEARCH + "sources = [{ url = 'memory://', lain = 'bulk' }]",
        "[pipeline.search]: sources: unknown setting 'lain'; did you mean lane?",
    ),
    "a sink that is a list": (IN_SEARCH + "sink = ['memory://']", "[pipeline.search]: sink: ['memory://'] is no URL"),
    "an origin that is a number": (IN_SEARCH + "origin = 5", "[pipeline.search]: origin: 5 is no URL"),
    "an origin that is not there": (
        IN_SEARCH + "origin = 'toml_shop:TRUHT'",
        "[pipeline.search]: origin: toml_shop has no object 'TRUHT'; did you mean toml_shop:TRUTH?",
    ),
    "an unknown word of retry": (
        IN_SEARCH + "retry = { attemps = 5 }",
        "[pipeline.search]: retry: unknown setting 'attemps'; did you mean attempts?",
    ),
    "retry as a number": (
        IN_SEARCH + "retry = 5",
        "[pipeline.search]: retry is no table; write retry = { attempts = 5,",
    ),
    "a rate without a number": (
        IN_SEARCH + "rate = { per = '1s' }",
        '[pipeline.search]: rate: n is missing; write rate = { n = 1, per = "1s" }',
    ),
    "a rate of nothing": (IN_SEARCH + "rate = { n = 0 }", "[pipeline.search]: rate: Rate(n=0) must be a whole number"),
    "a debounce that waits too little": (
        IN_SEARCH + "debounce = { quiet = '5s', max_wait = '1s' }",
        "[pipeline.search]: debounce: Debounce: max_wait=1.0 is below quiet=5.0; raise it",
    ),
    "an unknown word of debounce": (
        IN_SEARCH + "debounce = { quiet = '5s', maxwait = '1s' }",
        "[pipeline.search]: debounce: unknown setting 'maxwait'; did you mean max_wait?",
    ),
    "a function without a module": (
        IN_SEARCH + "apply = 'index'",
        "[pipeline.search]: apply: 'index' names no function; write apply = \"module:function\"",
    ),
    "a function that is a number": (
        IN_SEARCH + "read = 5",
        "[pipeline.search]: read: 5 names no function; write read =",
    ),
    "a module that is not there": (
        IN_SEARCH + "apply = 'toml_shopp:index'",
        "[pipeline.search]: apply: no module is called 'toml_shopp', looked for in ",
    ),
    "a function that is not there": (
        IN_SEARCH + "apply = 'toml_shop:indx'",
        "[pipeline.search]: apply: toml_shop has no function 'indx'; did you mean toml_shop:index?",
    ),
    "a function like no other": (
        IN_SEARCH + "apply = 'toml_shop:xyz'",
        "toml_shop has no function 'xyz'; define it there",
    ),
    "a function that is none": (
        IN_SEARCH + "apply = 'toml_shop:TITLE'",
        "[pipeline.search]: apply: toml_shop:TITLE is no function but str; name a function",
    ),
    "a module that is broken": (
        IN_SEARCH + "apply = 'toml_broken:index'",
        "[pipeline.search]: apply: toml_broken cannot be imported: ZeroDivisionError: division by zero (",
    ),
    "a missing variable": (
        IN_SEARCH + "sources = ['amqp://user:${SHOP_NOTHING}@host/q']",
        "[pipeline.search]: sources: amqp://user:***@host/q needs the environment variable SHOP_NOTHING, which",
    ),
    "a missing variable at the top": (
        "ledger = '${SHOP_NOTHING}'",
        "ledger: ${SHOP_NOTHING} needs the environment var",
    ),
    "a variable without an end": (
        IN_SEARCH + "sink = 'sqlite:///${SHOP_DB'",
        "sink: in sqlite:///${SHOP_DB, a name and }",
    ),
    "a variable without a name": (IN_SEARCH + "sink = 'sqlite:///${}'", "write ${NAME}, or $${ for the text ${"),
    "a variable with a default": (
        IN_SEARCH + "sink = 'sqlite:///${A:-b}'",
        "[pipeline.search]: sink: in sqlite:///${A:-b}",
    ),
    "a table twice": (
        IN_SEARCH + "[pipeline.search]",
        "is no TOML: Cannot declare ('pipeline', 'search') twice (at line 4,",
    ),
    "a word twice": (IN_SEARCH + "key = 'a'", "is no TOML: Cannot overwrite a value (at line 4, the last one)"),
    "no TOML": ("ledger = sqlite", "is no TOML: Invalid value (at line 1, column 10)"),
    "TOML without end": ("a = " + "[" * 10_000, "has values inside of values without end"),
}


@pytest.mark.parametrize(("text", "message"), OWN_MISTAKES.values(), ids=OWN_MISTAKES.keys())
def test_a_mistake_in_a_file_is_told_with_its_place_and_what_to_write(folder: Folder, text: str, message: str):
    (folder.path / "toml_broken.py").write_text("1 / 0\n")
    said = str(folder.error(text))
    assert said.startswith(str(folder.file))
    assert message in said


def test_a_file_that_cannot_be_read_is_named(folder: Folder, tmp_path: Path):
    with pytest.raises(SettingsError, match=r"there is no file '.*nothing\.toml', seen from "):
        keywise.load(tmp_path / "nothing.toml")
    with pytest.raises(SettingsError, match="cannot be read: Is a directory"):
        keywise.load(str(tmp_path))
    folder.file.write_bytes(b'ledger = "\xff"')
    with pytest.raises(SettingsError, match="is no UTF-8 text at byte 10; save it as UTF-8"):
        keywise.load(folder.file)
