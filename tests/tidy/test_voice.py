"""Plain words: docs, and docstrings and comments of some folders, avoid the words that this file lists."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from tidy.tree import Module, expect_none, modules, texts

# The word that is refused, and what to write.
WORDS = {
    "whoever": "name the actor: the caller, the worker, the operator",
    "whatever": "name the thing, or write any, every",
    "whichever": "name the thing, or write each",
    "nobody": "name the actor: no worker, no process",
    "somebody": "name the actor: another worker, an operator",
    "anew": "again",
    "tell": "report, notify, show, say",
    "tells": "reports, notifies, shows, says",
    "telling": "reporting, notifying",
    "told": "reported, notified, shown",
    "mend": "repair",
    "mends": "repairs",
    "mended": "repaired",
    "bury": "dead-letter",
    "buries": "dead-letters",
    "buried": "dead-lettered, or stored as a dead letter",
    "burial": "dead letter",
    "plug": "adapter",
    "plugs": "adapters",
}
PATTERN = re.compile(r"(?<![\w`.])(" + "|".join(WORDS) + r")(?![\w`(])", re.IGNORECASE)

FOLDERS = (
    "src/keywise/adapters/aws/",
    "src/keywise/adapters/dynamodb/",
    "src/keywise/adapters/function/",
    "src/keywise/adapters/http/",
    "src/keywise/adapters/opensearch/",
    "src/keywise/adapters/pubsub/",
    "src/keywise/adapters/rabbitmq/",
    "src/keywise/cli/",
    "src/keywise/core/",
    "src/keywise/flow/",
    "src/keywise/observe/",
    "src/keywise/operate/",
    "src/keywise/reindex/",
    "src/keywise/ingest/",
    "src/keywise/testing/conformance/",
    "src/keywise/testing/handlers/",
    "src/keywise/testing/simulator/reindex/",
)

# Files that still use such words. The list only gets shorter: a file that no longer needs its line here is reported.
NOT_YET = {
    "src/keywise/core/serial/contract.py",
    "src/keywise/core/serial/rules.py",
    "src/keywise/core/serial/steps.py",
    "src/keywise/testing/conformance/serial/endings.py",
    "src/keywise/testing/conformance/serial/modes.py",
    "src/keywise/testing/conformance/serial/ordering.py",
    "src/keywise/testing/conformance/serial/random_histories.py",
}


def page_faults(path: str, text: str) -> list[str]:
    """Words in the prose of a Markdown page; blocks of code and `code` in a line are left out."""
    found, inside = [], False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            found += _faults(f"{path}:{number}", re.sub(r"`[^`]*`", "", line))
    return found


def module_faults(module: Module) -> list[str]:
    """Words in docstrings, in texts that follow an attribute, and in comments."""
    return [fault for line, text in _prose(module) for fault in _faults(f"{module.path}:{line}", text)]


def _prose(module: Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _faults(place: str, text: str) -> list[str]:
    return [f"{place}: {word}; write: {WORDS[word.lower()]}" for word in PATTERN.findall(text)]


def _judged_modules() -> list[Module]:
    return [module for module in modules("src") if module.path.startswith(FOLDERS)]


def test_the_docs_use_plain_words():
    pages = {path: text for path, text in texts().items() if path == "README.md" or path.startswith("docs/")}
    pages = {path: text for path, text in pages.items() if path.endswith(".md")}
    assert len(pages) > 50
    expect_none(fault for path, text in sorted(pages.items()) for fault in page_faults(path, text))


def test_these_folders_use_plain_words():
    judged = [module for module in _judged_modules() if module.path not in NOT_YET]
    expect_none(fault for module in judged for fault in module_faults(module))


def test_the_list_of_files_that_do_not_yet_only_gets_shorter():
    found = {module.path for module in _judged_modules() if module_faults(module)}
    assert found >= NOT_YET, f"take these off NOT_YET: {', '.join(sorted(NOT_YET - found))}"


def test_a_word_in_prose_is_reported_with_what_to_write():
    assert page_faults("a.md", "It is told once.") == ["a.md:1: told; write: reported, notified, shown"]
    assert len(page_faults("a.md", "Whoever asks, and nobody else.")) == 2
    assert page_faults("a.md", "`told` is a name.\n\n```text\nnobody\n```\nUntold, plugin, endangered.") == []


def test_a_word_in_a_docstring_or_a_comment_is_reported():
    for text in ('"""Tells it."""', "x = 1  # whatever it is", 'x = 1\n"""Buried then."""', "def f():\n    '''anew'''"):
        assert len(module_faults(Module.of("src/keywise/core/a.py", text))) == 1, text
    assert module_faults(Module.of("src/keywise/core/a.py", 'tell = "nobody"')) == []
