"""From a claimed job to one that can run: decode, validate, tokenize, catch up with its stream."""

from __future__ import annotations

import logging
from typing import Any

from pydantic import ValidationError
from redis import Redis

from omlx_producer.protocol import InvalidRequest, TokensEvent, events_key, parse_event
from omlx_worker.active import ActiveJob
from omlx_worker.claimed import ClaimedJob
from omlx_worker.engine.interface import Engine
from omlx_worker.jobs import decode_request
from omlx_worker.messages import Failed

log = logging.getLogger("omlx_worker.intake")


class Intake:
    """Prepares jobs for one engine under one alias. Runs on the main thread."""

    def __init__(self, engine: Engine, model_alias: str, connection: Redis) -> None:
        self._engine = engine
        self._model_alias = model_alias
        self._connection = connection

    def prepare(self, claim: ClaimedJob) -> ActiveJob | Failed:
        """Make a job ready to be admitted, or say why it can not be served."""
        try:
            request = decode_request(claim.data, self._model_alias)
            rows = self._engine.prepare(request, claim.id)
        except InvalidRequest as error:
            return Failed(str(error), retry=False)
        except Exception as error:
            log.exception("job %s could not be prepared", claim.id)
            return Failed(f"the job could not be prepared: {type(error).__name__}: {error}")
        claim.data = b""
        claim.rows = len(rows)
        bulk = claim.queue.endswith(":bulk")
        streams = not bulk if request.stream is None else request.stream
        job = ActiveJob(claim, request, rows, streams=streams)
        if claim.streamed:
            self._catch_up(job)
        return job

    def _catch_up(self, job: ActiveJob) -> None:
        key = events_key(job.id)
        entries: Any = self._connection.xrange(key)
        try:
            events = [
                event
                for _, fields in entries
                if isinstance(event := parse_event(fields[b"event"]), TokensEvent)
            ]
            job.resume(events)
        except (ValidationError, KeyError, IndexError):
            log.warning("the stream of job %s can not be read; starting it anew", job.id)
            self._connection.delete(key)
            job.resume(())
