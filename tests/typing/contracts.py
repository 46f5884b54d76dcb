"""Every adapter class under every contract that it serves; mypy compares them, as a part of `make check`.

Each name below is a contract and the classes that serve it.
A parameter that changes in one class, or in the contract only, is an error in this file.
`test_contracts.py` checks that no class and no contract is missing.
"""

from keywise.adapters.dynamodb.origin import DynamoOrigin
from keywise.adapters.dynamodb.sink import DynamoSink
from keywise.adapters.function.origin import FunctionOrigin
from keywise.adapters.function.sink import FunctionSink, TransactedFunctionSink
from keywise.adapters.http.notifier import HttpNotifier
from keywise.adapters.http.sink import HttpSink
from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.dump import MemoryLedgerTransfer
from keywise.adapters.memory.ledger import MemoryLedger, MemoryTransaction, MemoryWorkingSet
from keywise.adapters.memory.origin import MemoryOrigin
from keywise.adapters.memory.serial import MemoryTurns
from keywise.adapters.memory.serial_book import MemoryTurnBook
from keywise.adapters.memory.sink import MemorySink, MemoryTable
from keywise.adapters.memory.source import MemorySource, MemoryTransactionalQueue
from keywise.adapters.obstore.store import BucketStore, FolderStore
from keywise.adapters.opensearch.sink import OpenSearchSink
from keywise.adapters.postgres.database import PostgresDatabase
from keywise.adapters.postgres.ledger.dump import PostgresLedgerTransfer
from keywise.adapters.postgres.ledger.ledger import PostgresLedger
from keywise.adapters.postgres.ledger.transaction import PostgresTransaction
from keywise.adapters.postgres.ledger.working_set import PostgresWorkingSet
from keywise.adapters.postgres.origin import PostgresOrigin, PostgresReadDatabase
from keywise.adapters.postgres.record_table import PostgresRecordTable
from keywise.adapters.postgres.serial.admin import PostgresTurnsOperator
from keywise.adapters.postgres.serial.lock_backend import PostgresLockTurns
from keywise.adapters.postgres.serial.queue_backend import PostgresQueueTurns
from keywise.adapters.postgres.serial.transaction import PostgresTurnsTransaction
from keywise.adapters.postgres.sink import PostgresSink
from keywise.adapters.postgres.source import PostgresSource, PostgresTransactionalQueue
from keywise.adapters.pubsub.source import PubSubSource
from keywise.adapters.rabbitmq.source import RabbitSource
from keywise.adapters.redis.ledger.dump import RedisLedgerTransfer
from keywise.adapters.redis.ledger.history import RedisHistoryStore
from keywise.adapters.redis.ledger.ledger import RedisLedger
from keywise.adapters.redis.ledger.working_set import RedisWorkingSet
from keywise.adapters.redis.serial.admin import RedisTurnsOperator
from keywise.adapters.redis.serial.backend import RedisTurns
from keywise.adapters.sqlite.database import SqliteDatabase
from keywise.adapters.sqlite.ledger.dump import SqliteLedgerTransfer
from keywise.adapters.sqlite.ledger.ledger import SqliteLedger
from keywise.adapters.sqlite.ledger.transaction import SqliteTransaction
from keywise.adapters.sqlite.ledger.working_set import SqliteWorkingSet
from keywise.adapters.sqlite.origin import SqliteOrigin
from keywise.adapters.sqlite.record_table import SqliteRecordTable
from keywise.adapters.sqlite.serial.backend import SqliteTurns
from keywise.adapters.sqlite.serial.book import SqliteTurnBook
from keywise.adapters.sqlite.sink import SqliteSink
from keywise.adapters.sqlite.source import SqliteSource, SqliteTransactionalQueue
from keywise.adapters.sqs.source import SqsSource
from keywise.core.admin import ControlStore, LedgerAdmin, PeriodicLock
from keywise.core.database import AsyncDatabase, FairWriteDatabase, SingleWriterDatabase
from keywise.core.history import HistoryStore
from keywise.core.ledger import Ledger, LosesWrites, MarkingLedger, PluggedLedger, TransferableLedger
from keywise.core.ledger_steps import WorkingSet
from keywise.core.notifier import Notifier
from keywise.core.object_store import ObjectStore
from keywise.core.origin import FilterableOrigin, Origin
from keywise.core.record import RecordTable
from keywise.core.serial.contract import CountsLostSessions, TransactedTurns, Turns, TurnsOperator, TurnsTransaction
from keywise.core.serial.steps import TurnBook
from keywise.core.sink import AtomicSink, ColumnSink, EmptyReportingSink, ReadableSink, Sink
from keywise.core.source import (
    AckTimeoutSource,
    BacklogSource,
    HeaderSource,
    LeaseFollowingSource,
    OutboxSource,
    ParkingSource,
    RedrivingSource,
    Source,
    TransactionalQueue,
    TransactionalSource,
)
from keywise.core.target import AliasSink, MovableSink, RenamingSink
from keywise.core.transaction import MarkingTransaction, Transaction
from keywise.core.transfer import ComparingTransfer, LedgerTransfer

# Sources.
SOURCE: tuple[type[Source], ...] = (
    MemorySource,
    SqliteSource,
    PostgresSource,
    RabbitSource,
    SqsSource,
    PubSubSource,
)
TRANSACTIONAL_SOURCE: tuple[type[TransactionalSource], ...] = (MemorySource, SqliteSource, PostgresSource)
TRANSACTIONAL_QUEUE: tuple[type[TransactionalQueue], ...] = (
    MemoryTransactionalQueue,
    SqliteTransactionalQueue,
    PostgresTransactionalQueue,
)
PARKING_SOURCE: tuple[type[ParkingSource], ...] = (
    MemorySource,
    SqliteSource,
    PostgresSource,
    MemoryTransactionalQueue,
    SqliteTransactionalQueue,
    PostgresTransactionalQueue,
)
OUTBOX_SOURCE: tuple[type[OutboxSource], ...] = (PostgresSource,)
HEADER_SOURCE: tuple[type[HeaderSource], ...] = (RabbitSource, SqsSource, PubSubSource)
ACK_TIMEOUT_SOURCE: tuple[type[AckTimeoutSource], ...] = (RabbitSource,)
BACKLOG_SOURCE: tuple[type[BacklogSource], ...] = (RabbitSource, SqsSource, PubSubSource)
REDRIVING_SOURCE: tuple[type[RedrivingSource], ...] = (PubSubSource,)
LEASE_FOLLOWING_SOURCE: tuple[type[LeaseFollowingSource], ...] = (
    MemorySource,
    SqliteSource,
    PostgresSource,
    RabbitSource,
    SqsSource,
    PubSubSource,
)

# Ledgers.
LEDGER: tuple[type[Ledger], ...] = (MemoryLedger, SqliteLedger, PostgresLedger, RedisLedger)
PLUGGED_LEDGER: tuple[type[PluggedLedger], ...] = (MemoryLedger, SqliteLedger, PostgresLedger, RedisLedger)
TRANSFERABLE_LEDGER: tuple[type[TransferableLedger], ...] = (MemoryLedger, SqliteLedger, PostgresLedger, RedisLedger)
MARKING_LEDGER: tuple[type[MarkingLedger], ...] = (PostgresLedger,)
LOSES_WRITES: tuple[type[LosesWrites], ...] = (RedisLedger,)
LEDGER_ADMIN: tuple[type[LedgerAdmin], ...] = (MemoryLedger, SqliteLedger, PostgresLedger, RedisLedger)
CONTROL_STORE: tuple[type[ControlStore], ...] = (
    MemoryLedger,
    SqliteLedger,
    PostgresLedger,
    RedisLedger,
)
PERIODIC_LOCK: tuple[type[PeriodicLock], ...] = (
    MemoryLedger,
    SqliteLedger,
    PostgresLedger,
    RedisLedger,
)
HISTORY_STORE: tuple[type[HistoryStore], ...] = (
    MemoryLedger,
    SqliteLedger,
    PostgresLedger,
    RedisHistoryStore,
)
LEDGER_TRANSFER: tuple[type[LedgerTransfer], ...] = (
    MemoryLedgerTransfer,
    SqliteLedgerTransfer,
    PostgresLedgerTransfer,
    RedisLedgerTransfer,
)
COMPARING_TRANSFER: tuple[type[ComparingTransfer], ...] = (PostgresLedgerTransfer,)
WORKING_SET: tuple[type[WorkingSet], ...] = (
    MemoryWorkingSet,
    SqliteWorkingSet,
    PostgresWorkingSet,
    RedisWorkingSet,
)
TRANSACTION: tuple[type[Transaction], ...] = (MemoryTransaction, SqliteTransaction, PostgresTransaction)
MARKING_TRANSACTION: tuple[type[MarkingTransaction], ...] = (PostgresTransaction,)

# Sinks.
SINK: tuple[type[Sink], ...] = (MemorySink, HttpSink, OpenSearchSink, DynamoSink, FunctionSink)
ATOMIC_SINK: tuple[type[AtomicSink], ...] = (
    MemoryTable,
    SqliteSink,
    SqliteRecordTable,
    PostgresSink,
    PostgresRecordTable,
    TransactedFunctionSink,
)
RECORD_TABLE: tuple[type[RecordTable], ...] = (SqliteRecordTable, PostgresRecordTable)
READABLE_SINK: tuple[type[ReadableSink], ...] = (
    MemorySink,
    MemoryTable,
    SqliteSink,
    PostgresSink,
    OpenSearchSink,
    DynamoSink,
)
NAME_COLUMNS: tuple[type[ColumnSink], ...] = (SqliteSink, PostgresSink, SqliteRecordTable, PostgresRecordTable)
CAN_BE_EMPTY: tuple[type[EmptyReportingSink], ...] = (SqliteSink, PostgresSink, OpenSearchSink, DynamoSink)
MOVABLE_SINK: tuple[type[MovableSink], ...] = (MemorySink, MemoryTable, SqliteSink, PostgresSink, OpenSearchSink)
ALIAS_SINK: tuple[type[AliasSink], ...] = (MemorySink, OpenSearchSink)
RENAMING_SINK: tuple[type[RenamingSink], ...] = (MemoryTable, SqliteSink, PostgresSink)

# Origins.
SEARCHABLE_ORIGIN: tuple[type[FilterableOrigin], ...] = (SqliteOrigin, PostgresOrigin)
ORIGIN: tuple[type[Origin], ...] = (MemoryOrigin, SqliteOrigin, PostgresOrigin, DynamoOrigin, FunctionOrigin)

# Notifiers.
NOTIFIER: tuple[type[Notifier], ...] = (HttpNotifier,)

# Object stores.
OBJECT_STORE: tuple[type[ObjectStore], ...] = (BucketStore, FolderStore)

# Databases.
FAIR_WRITE_DATABASE: tuple[type[FairWriteDatabase], ...] = (SqliteDatabase,)
ASYNC_DATABASE: tuple[type[AsyncDatabase], ...] = (PostgresDatabase, PostgresReadDatabase)
SINGLE_WRITER_DATABASE: tuple[type[SingleWriterDatabase], ...] = (SqliteDatabase, MemoryDatabase)

# Stores of serial functions.
TURNS: tuple[type[Turns], ...] = (MemoryTurns, SqliteTurns, PostgresLockTurns, PostgresQueueTurns, RedisTurns)
TRANSACTED_TURNS: tuple[type[TransactedTurns], ...] = (MemoryTurns, SqliteTurns, PostgresLockTurns, PostgresQueueTurns)
TURNS_TRANSACTION: tuple[type[TurnsTransaction], ...] = (PostgresTurnsTransaction,)
TURNS_OPERATOR: tuple[type[TurnsOperator], ...] = (MemoryTurns, SqliteTurns, PostgresTurnsOperator, RedisTurnsOperator)
COUNTS_LOST_SESSIONS: tuple[type[CountsLostSessions], ...] = (PostgresTurnsOperator,)
TURN_BOOK: tuple[type[TurnBook], ...] = (MemoryTurnBook, SqliteTurnBook)
