"""The definition of an index: what is taken over from another index, and what is remembered."""

from keywise.adapters.opensearch.definition import IndexState, definition_like

OWN = {
    "index.blocks.write": "true",
    "index.creation_date": "1795040381288",
    "index.history.uuid": "a",
    "index.provided_name": "pages-0",
    "index.resize.source.name": "pages",
    "index.routing.allocation.initial_recovery._id": "a",
    "index.shrink.source.name": "pages",
    "index.uuid": "a",
    "index.verified_before_close": "true",
    "index.version.created": "136408127",
}
CHOSEN = {"index.number_of_shards": "3", "index.routing.allocation.require.box": "hot", "index.sort.field": ["a"]}


def test_what_an_index_gets_by_itself_is_left_out():
    index = IndexState(mappings={"dynamic": "strict"}, settings={**OWN, **CHOSEN, "index.refresh_interval": None})
    assert definition_like(index) == {"mappings": {"dynamic": "strict"}, "settings": CHOSEN}


def test_a_note_of_another_make_is_none():
    for meta in ({}, {"keywise": 5}, {"keywise": {"pipeline": "shop"}}, [], None):
        assert IndexState(mappings={"_meta": meta}).note is None
    note = IndexState(mappings={"_meta": {"keywise": {"pipeline": "shop", "generation": 7, "more": 1}}}).note
    assert note is not None and (note.run.pipeline, note.run.generation, note.restore) == ("shop", 7, None)
