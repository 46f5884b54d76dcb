"""Queue, ledger and table in one Postgres database; triggers in it log every write, every mark and every takeover."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import asyncpg

from chaos.witness import Witness
from keywise import Change, OutcomeUnknownError, Transaction
from keywise.core.clock import boot_time
from servers.postgres import PostgresServer

T = TypeVar("T")

WEIGHT_S = 0.001
"""What each write costs, as in a table with many indexes, so that kills fall inside batches."""
AWAY_S = 30.0
"""How long a server may take to come back."""
LOST = (OSError, asyncpg.PostgresConnectionError, asyncpg.CannotConnectNowError, asyncpg.InterfaceError)
BOUNDS = "set lock_timeout = '1s'; set statement_timeout = '1s'"
"""A write of a plain handler lands soon or never: the horizon of repairs relies on that."""
TABLES = """
create table stock (key text primary key, version bigint, body text);
create table truth (key text primary key, version bigint, body bytea, gone boolean);
create table log (
    seq bigint generated always as identity, key text, version bigint, op text, suspicions bigint,
    transaction bigint default txid_current()
);
create table takeovers (key text, suspect_before bigint, suspect_after bigint);
-- A mark may be written before its effect, in the same transaction. Whoever writes to a key has it locked until then.
create view history as select key, version, op, suspicions from log
    order by key, min(seq) over (partition by key, transaction), op in ('mark', 'tombstone'), seq;
create view held as select convert_from(key, 'utf8') as key from keywise_active where token != 0 order by key;

create function suspicion(which text) returns bigint language sql as
    'select suspicions from keywise_active where key = convert_to(which, ''utf8'')';
create function note_write() returns trigger language plpgsql as $$ begin
    if tg_op = 'DELETE' then
        -- The version is that of the tombstone which follows.
        insert into log (key, op) values (old.key, 'delete');
    else
        insert into log (key, version, op, suspicions) values (new.key, new.version, 'write', suspicion(new.key));
    end if;
    return null;
end $$;
create function note_mark() returns trigger language plpgsql as $$ begin
    if tg_op = 'INSERT' or (old.version, old.deleted) is distinct from (new.version, new.deleted) then
        insert into log (key, version, op) values (
            convert_from(new.key, 'utf8'), new.version, case when new.deleted then 'tombstone' else 'mark' end);
    end if;
    return null;
end $$;
create function note_takeover() returns trigger language plpgsql as $$ begin
    insert into takeovers values (convert_from(new.key, 'utf8'), old.suspicions, new.suspicions);
    return null;
end $$;
create function weigh() returns trigger language plpgsql as $$ begin
    perform pg_sleep({weight_s});
    return new;
end $$;
create trigger noted after insert or update or delete on stock for each row execute function note_write();
create trigger weighed before insert on stock for each row execute function weigh();
create trigger marked after insert or update on keywise_marks for each row when (new.version is not null)
    execute function note_mark();
create trigger taken_over after update on keywise_active for each row
    when (new.token != 0 and old.token not in (0, new.token)) execute function note_takeover();

-- What a plain handler does, in one step: writes to one key come one after another, deletions of nothing too.
-- It tells the newest version that was there before.
create index log_by_key on log (key);
create function keep(which text, what bigint, how text, gone boolean) returns bigint language plpgsql as $$
declare
    newest bigint;
begin
    perform pg_advisory_xact_lock(hashtext(which));
    select max(version) into newest from log where key = which and op in ('write', 'delete');
    if gone then
        delete from stock where key = which;
        insert into log (key, version, op, suspicions) values (which, what, 'delete', suspicion(which));
    else
        insert into stock values (which, what, how)
            on conflict (key) do update set version = excluded.version, body = excluded.body;
    end if;
    return newest;
end $$;
"""
UPSERT = (
    "insert into stock (key, version, body) values ($1, $2, $3) "
    "on conflict (key) do update set version = excluded.version, body = excluded.body"
)
TELL_TRUTH = (
    "insert into truth values ($1, $2, $3, $4) on conflict (key) do update set "
    "version = excluded.version, body = excluded.body, gone = excluded.gone"
)


class PostgresShelf:
    """A database that all processes of a run share."""

    on = "postgres"
    logs_marks = True

    def __init__(self, server: PostgresServer, url: str = "") -> None:
        self.server = server
        self.url = self.ledger = url or server.url
        self._runner = asyncio.Runner()
        self._connection: Any = None

    def create(self, *, is_heavy: bool) -> None:
        script = TABLES.format(weight_s=WEIGHT_S if is_heavy else 0)
        self.ask(lambda connection: connection.execute(script))

    def rows(self, statement: str) -> list[tuple]:
        return [tuple(row) for row in self.ask(lambda connection: connection.fetch(statement))]

    def tell_truth(self, rows: Sequence[tuple]) -> None:
        self.ask(lambda connection: connection.executemany(TELL_TRUTH, rows))

    def restart(self) -> None:
        """Every connection is cut, and whatever was not committed is gone."""
        self.server.restart()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
        self._runner.close()

    def ask(self, act: Callable[[Any], Awaitable[T]]) -> T:
        """Do something that may be done twice, over a connection of its own, as soon as the server can be reached."""

        async def asked() -> T:
            if self._connection is None or self._connection.is_closed():
                self._connection = await asyncpg.connect(self.url)
            return await act(self._connection)

        give_up_at = boot_time() + AWAY_S
        while True:
            try:
                return self._runner.run(asked())
            except LOST:
                if boot_time() > give_up_at:
                    raise


class Handlers:
    """What is done with a change, each way."""

    def __init__(self, url: str, witness: Witness) -> None:
        self._url = url
        self._witness = witness
        self.observers = ()
        self._free: list[Any] = []

    async def leased(self, change: Change[dict]) -> None:
        """A plain sink: a store of its own, as far as keywise knows."""
        await self.kept(change)

    async def kept(self, change: Change[dict]) -> int | None:
        """Write; the newest version that was there before."""
        self._witness.obey(change)
        body = change.body.decode()
        return await self.asked("select keep($1, $2, $3, $4)", change.key, change.version, body, change.deleted)

    async def transacted(self, change: Change[dict], transaction: Transaction) -> None:
        self._witness.obey(change)
        if change.deleted:
            await transaction.connection.execute("delete from stock where key = $1", change.key)
        else:
            await transaction.connection.execute(UPSERT, change.key, change.version, change.body.decode())

    async def refetch(self, key: str) -> bytes | None:
        """The newest body that the producer has sent, or will send next."""
        return await self.asked("select body from truth where key = $1", key)

    async def asked(self, statement: str, *arguments: object) -> Any:
        """One answer, over a connection that nobody else uses meanwhile."""
        connection = None
        try:
            connection = self._free.pop() if self._free else await asyncpg.connect(self._url)
            await connection.execute(BOUNDS)
            answer = await connection.fetchval(statement, *arguments)
        except LOST as error:
            raise OutcomeUnknownError(f"the server is away: {error}") from error
        finally:
            if connection is not None and not connection.is_closed():
                self._free.append(connection)
        return answer
