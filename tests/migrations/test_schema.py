"""The migrations build exactly the tables that the statements are written for."""

from __future__ import annotations

from typing import Any

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect

from deerflow_runs.store import schema
from deerflow_runs.store.migrate import head, migrations, upgrade
from tests.migrations.databases import ask, indexes, is_sqlite, on
from tests.rules import rule


@pytest.fixture
def migrated(empty: str) -> str:
    upgrade(empty)
    return empty


@pytest.fixture
def declared(migrated: str, request: pytest.FixtureRequest) -> str:
    """Another database of the same kind, made straight from the metadata: what the migrations must equal."""
    dsn: str = migrated + ".declared" if is_sqlite(migrated) else request.getfixturevalue("second_postgres")
    on(dsn, schema.metadata.create_all)
    return dsn


def described(connection: Connection) -> dict[str, Any]:
    """All that the database itself says about our tables."""
    found = inspect(connection)
    return {
        table: {
            "columns": [{**column, "type": str(column["type"])} for column in found.get_columns(table)],
            "key": found.get_pk_constraint(table),
            "unique": found.get_unique_constraints(table),
            "checks": found.get_check_constraints(table),
            "foreign": found.get_foreign_keys(table),
            "options": found.get_table_options(table),
        }
        for table in found.get_table_names()
        if table != "dr_alembic_version"
    }


def test_the_migrations_build_the_tables_of_the_metadata_column_by_column(migrated: str, declared: str) -> None:
    built = on(migrated, described)
    assert built.keys() == schema.metadata.tables.keys()
    assert built == on(declared, described)


@rule("I1", "B253")
def test_the_migrations_build_the_indexes_of_the_metadata_word_by_word(migrated: str, declared: str) -> None:
    assert indexes(migrated) == indexes(declared)


def test_the_stored_words_of_each_sqlite_table_are_those_of_the_metadata(empty_sqlite: str) -> None:
    upgrade(empty_sqlite)
    other = empty_sqlite + ".declared"
    on(other, schema.metadata.create_all)
    words = "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name <> 'dr_alembic_version' ORDER BY name"
    assert [(name, _spaced(sql)) for name, sql in ask(empty_sqlite, words)] == [
        (name, _spaced(sql)) for name, sql in ask(other, words)
    ]


def _spaced(sql: str) -> str:
    return " ".join(sql.split())


@rule("I1", "O2")
def test_one_active_operation_a_thread_is_the_predicate_of_a_unique_index(migrated: str) -> None:
    words = indexes(migrated)["uq_dr_runs_active_thread"]
    assert words.startswith("CREATE UNIQUE INDEX")
    assert words.endswith("(thread_id) WHERE active")


def test_postgres_leaves_room_on_the_pages_that_change(empty_postgres: str) -> None:
    upgrade(empty_postgres)
    options = (
        "SELECT relname, reloptions FROM pg_class WHERE relname LIKE 'dr!_%' ESCAPE '!' AND reloptions IS NOT NULL"
    )
    assert sorted(ask(empty_postgres, options)) == [("dr_runs", ["fillfactor=80"]), ("dr_workers", ["fillfactor=50"])]


@rule("O15")
def test_no_session_of_postgres_hoards_numbers(empty_postgres: str) -> None:
    upgrade(empty_postgres)
    counters = "SELECT sequencename, start_value, increment_by, cache_size, cycle FROM pg_sequences ORDER BY 1"
    assert ask(empty_postgres, counters) == [("dr_seq", 1, 1, 1, False), ("dr_turn", 1, 1, 1, False)]


def test_a_new_database_states_its_facts(migrated: str) -> None:
    facts = {"min_reader": 1, "payload_version": 1}
    counters = {"seq": 0, "turn": 0} if is_sqlite(migrated) else {}
    assert dict(ask(migrated, "SELECT name, number FROM dr_meta")) == facts | counters


def test_the_history_is_one_line_whose_end_the_file_names_tell() -> None:
    config = Config()
    config.set_main_option("script_location", str(migrations()))
    history = list(ScriptDirectory.from_config(config).walk_revisions())
    numbers = [step.revision for step in history]
    assert numbers == sorted(numbers, reverse=True)
    assert [step.down_revision for step in history] == [*numbers[1:], None]
    assert head() == numbers[0]


def test_no_migration_offers_a_way_back() -> None:
    texts = [file.read_text() for file in (migrations() / "versions").glob("*.py")]
    assert not [text for text in texts if "def downgrade" in text]
