"""Checks the input of each new batch, and uploads its rows to the queue.

Every gateway does, on a thread of its own, also what a gateway that died has left. A claim keeps
two of them from the same batch, but may run out under a slow one. So what makes the rows run once
is the record: it names the one batch of the queue that may be opened, before its upload begins.
Whoever takes over deletes that batch, and puts another one in its place; or, if it is open already,
takes it as it is.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from typing import IO, Any

from redis import Redis
from redis.exceptions import RedisError
from redis.utils import str_if_bytes

from omlx_gateway.batch_input import BatchInput, batch_error
from omlx_gateway.batches import UNFINISHED_KEY, BatchRecords, drop_upload
from omlx_gateway.errors import ApiError, api_error, log_failure, logged_outage
from omlx_gateway.files import FileStore
from omlx_producer.bulk.batch import Batch
from omlx_producer.errors import InvalidRequest, UnknownJob

LOOK_SECONDS = 0.5
CLEAN_SECONDS = 600
CLAIM_SECONDS = 10.0

log = logging.getLogger(__name__)

# Only the holder of a claim renews it, or gives it back.
_RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""


class Stopped(Exception):
    """The gateway ends, or the batch is another one's."""


class Intake:
    """The thread that uploads batches.

    Args:
        files: of all owners.
    """

    def __init__(self, connection: Redis, files: FileStore) -> None:
        self._connection = connection
        self._files = files
        self._records = BatchRecords(connection)
        self._broken = set[str]()
        self._outage = logged_outage()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="intake")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what it is at is left to another gateway."""
        self._over.set()
        self._thread.join(10)

    def _run(self) -> None:
        clean_at = time.monotonic()
        while not self._over.wait(LOOK_SECONDS):
            if time.monotonic() >= clean_at:
                clean_at += CLEAN_SECONDS
                with contextlib.suppress(OSError):
                    self._files.contents.clean_up()
            self.look()

    def look(self) -> None:
        """Upload the batches that wait for it."""
        try:
            for found in self._connection.smembers(UNFINISHED_KEY):
                batch_id = str_if_bytes(found)
                if not self._over.is_set() and batch_id not in self._broken:
                    self._tend(batch_id)
            self._outage.answered()
        except RedisError as error:
            self._outage.note(error)

    def _tend(self, batch_id: str) -> None:
        """Advance a batch. One that cannot be read holds up no others."""
        try:
            self._advance(batch_id)
        except RedisError:
            raise
        except Exception as error:  # noqa: BLE001 (logged without its message)
            self._broken.add(batch_id)
            log_failure(f"{batch_id}: left alone until the gateway starts again", error)

    def _advance(self, batch_id: str) -> None:
        try:
            record, _ = self._records.settle(batch_id)
        except ApiError:
            self._connection.srem(UNFINISHED_KEY, batch_id)
            return
        if record["status"] != "validating":
            return
        claim = Claim(self._connection, batch_id, self._over)
        if not claim.take():
            return
        try:
            self._take_in(batch_id, record, claim)
        except Stopped:
            log.info("%s: another gateway goes on with it", batch_id)
        except OSError as error:
            log.error("%s: cannot be uploaded (%s); it is tried again", batch_id, error)
        finally:
            claim.give_back()

    def _take_in(self, batch_id: str, record: dict[str, str], claim: Claim) -> None:
        """Bring a new batch into the queue, or fail it."""
        earlier = record.get("batch", "")
        if earlier:
            batch = Batch(self._connection, earlier)
            drop_upload(batch)
            if _exists(batch):
                self._begin(batch_id, earlier)
                return
        try:
            self._files.find(record["input_file_id"])
        except ApiError:
            message = f"the input file {record['input_file_id']} was deleted"
            self._records.fail(batch_id, [batch_error("file_not_found", message)])
            return
        content = self._files.contents.open(record["input_file_id"])
        if content is None:
            log.info("%s: its input is not where this gateway keeps files", batch_id)
            return
        with content:
            self._upload(batch_id, record, content, claim)

    def _upload(
        self, batch_id: str, record: dict[str, str], content: IO[bytes], claim: Claim
    ) -> None:
        """Bring the rows of a new batch into the queue, or fail it."""
        try:
            source = BatchInput(self._connection, content, record, claim.kept)
            if errors := source.errors():
                self._records.fail(batch_id, errors)
                return
        except InvalidRequest as error:
            self._records.fail(batch_id, [batch_error("invalid_request", api_error(error).message)])
            return
        batch = Batch.create(self._connection)
        if not self._records.move(
            batch_id, {"batch": batch.id}, status="validating", batch=record.get("batch", "")
        ):
            drop_upload(batch)
            return
        try:
            with source.rows() as rows:
                batch.upload(rows)
        except UnknownJob:
            raise Stopped from None
        except BaseException:
            with contextlib.suppress(RedisError):
                drop_upload(batch)
            raise
        self._begin(batch_id, batch.id)

    def _begin(self, batch_id: str, batch: str) -> None:
        changes = {"status": "in_progress", "in_progress_at": int(time.time())}
        self._records.move(batch_id, changes, status="validating", batch=batch)


class Claim:
    """The right to upload a batch, for a few seconds at a time."""

    def __init__(self, connection: Redis, batch_id: str, over: threading.Event) -> None:
        self._connection = connection
        self._key = f"omlx:http_batch:{batch_id}:claim"
        self._token = secrets.token_hex(8)
        self._over = over
        self._renew_at = 0.0
        self._renew = connection.register_script(_RENEW)

    def take(self) -> bool:
        self._renew_at = time.monotonic() + CLAIM_SECONDS / 4
        lease = int(1000 * CLAIM_SECONDS)
        return bool(self._connection.set(self._key, self._token, nx=True, px=lease))

    def kept(self, items: Any) -> Iterator[Any]:
        """These items, while the claim is kept.

        Raises, while iterating:
            Stopped: if it is lost, or the gateway ends.
        """
        for item in items:
            if self._over.is_set():
                raise Stopped
            if time.monotonic() > self._renew_at:
                self._renew_at = time.monotonic() + CLAIM_SECONDS / 4
                if not self._renew(keys=[self._key], args=[self._token, int(1000 * CLAIM_SECONDS)]):
                    raise Stopped
            yield item

    def give_back(self) -> None:
        with contextlib.suppress(RedisError):
            self._renew(keys=[self._key], args=[self._token, 0])


def _exists(batch: Batch) -> bool:
    try:
        batch.read()
    except UnknownJob:
        return False
    return True
