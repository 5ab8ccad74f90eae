"""Saves sessions from slots and restores them, between steps.

Everything here happens on the device thread. Keys and values are copied piece by piece, for about
half the duration of the last step, so that no user waits two steps for the next token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from glm_multiuser.engine.request import Request, user_of
from glm_multiuser.engine.runner import Runner
from glm_multiuser.sessions.identity import Identity
from glm_multiuser.sessions.session import CacheBytes, Session
from glm_multiuser.sessions.store import SessionStore

logger = logging.getLogger(__name__)

SHARE = 0.5
"""Duration of copying between two steps, as a fraction of the last step."""
IDLE_SECONDS = 0.02
"""Duration of copying at a time while nothing runs."""


class _Held(NamedTuple):
    """The contents of an idle user's slot."""

    slot: int
    identity: Identity
    token_ids: Sequence[int]


@dataclass
class _Saving:
    """A session that is being saved."""

    user: Hashable
    held: _Held
    rest: Iterator[CacheBytes]
    pieces: list[CacheBytes] = field(default_factory=list)


@dataclass
class _Restoring:
    """A session that is being restored."""

    request: Request
    identity: Identity
    tokens: int
    rest: Iterator[None]


class SlotSessions:
    """Sessions of the users of one engine's slots.

    Args:
        runner: copies keys and values.
        store: keeps sessions.
        reuse: whether the prefix cache of the user's slot is used; otherwise nothing is restored.
    """

    def __init__(self, runner: Runner, store: SessionStore, reuse: bool) -> None:
        self.store = store
        self.reuse = reuse
        self._runner = runner
        self._held: dict[Hashable, _Held] = {}
        """Idle users with cached tokens, least recently used first."""
        self._unsaved: dict[Hashable, None] = {}
        """Those whose session is not in the store."""
        self._wanted: dict[Hashable, list[Future[Session]]] = {}
        """Those whose slot is needed or to be exported -> futures that wait for a copy."""
        self._saving: Optional[_Saving] = None
        self._restoring: dict[int, _Restoring] = {}

    # Called by the scheduler.

    def ready(self, request: Request) -> bool:
        """Whether a waiting request's session is in a slot or in memory, or does not exist."""
        identity = self._restores(request)
        if identity is None or request.holder in self._held:
            return True
        return self.store.ready(identity, lambda: request.cancelled)

    def may_evict(self, user: Hashable) -> bool:
        """Whether the slot of an idle user may be taken: its session is saved, or cannot be."""
        if user in self._unsaved and user not in self._wanted:
            if self._has_room(self._held[user]):
                self._wanted[user] = []
            else:
                del self._unsaved[user]
        return user not in self._unsaved

    def drop(self, user: Hashable) -> None:
        """Forgets a user's slot, because its contents will change."""
        self._held.pop(user, None)
        self._unsaved.pop(user, None)
        for future in self._wanted.pop(user, []):
            future.set_exception(KeyError(user))
        if self._saving is not None and self._saving.user == user:
            self._saving = None

    def enter(self, slot: int, request: Request) -> bool:
        """Called when a request got a slot; returns whether a session must be restored first."""
        held = self._held.get(request.holder)
        self.drop(request.holder)
        identity = self._restores(request)
        if identity is None:
            if request.identity is not None:
                self.store.drop_inserted(request.identity)
            return False
        session = self.store.take(identity)
        tokens = request.common(session.token_ids) if session and not held else 0
        if session is None or not tokens:
            self.store.drop_inserted(identity)
            return False
        rest = self._runner.write_slot(slot, tokens, session.pieces)
        self._restoring[slot] = _Restoring(request, identity, tokens, rest)
        return True

    def leave(self, slot: int, request: Request, keep: bool, failed: bool) -> None:
        """Called when a request has left its slot; `keep`: its user keeps the slot."""
        self._restoring.pop(slot, None)
        if request.identity is None:
            return
        if failed:
            self.store.discard(request.identity)  # not tried again after a failure
        elif keep and request.computed_tokens:
            held = _Held(slot, request.identity, request.held_token_ids())
            self._held[request.holder] = held
            if self.store.keeps:
                self._unsaved[request.holder] = None

    # Called by the engine.

    def work(self, step_seconds: Optional[float]) -> tuple[bool, list[int]]:
        """Copies for a limited time; returns whether anything was copied, and the slots whose
        sessions are restored.

        Args:
            step_seconds: duration of the last step; None while nothing runs.
        """
        seconds = IDLE_SECONDS if step_seconds is None else SHARE * step_seconds
        until = time.perf_counter() + seconds
        done: list[int] = []
        copied = False
        while self._copy_piece(done):
            copied = True
            if time.perf_counter() >= until:
                break
        return copied, done

    def export(self, user: Hashable) -> Optional[Future[Session]]:
        """A future copy of an idle user's session, made by `work`; None if there is none.

        Its exception is a KeyError if the slot has changed meanwhile.
        """
        if user not in self._held:
            return None
        future: Future[Session] = Future()
        self._wanted.setdefault(user, []).append(future)
        return future

    def export_all(self) -> list[Future[Session]]:
        """Copies of all idle users' sessions that are not in the store and that it will keep."""
        every = self.store.writes_behind
        users = [user for user in self._unsaved if every or self._has_room(self._held[user])]
        futures = map(self.export, users)
        return [future for future in futures if future is not None]

    def flush(self) -> None:
        """Saves all idle users' sessions immediately, before all slots are cleared."""
        self._restoring = {}
        self.export_all()
        while self._copy_piece([]):
            pass
        self.reset()

    def reset(self) -> None:
        """Forgets the contents of all slots."""
        self._restoring = {}
        for user in list(self._held):
            self.drop(user)

    def of_owner(self, owner: str) -> list[tuple[Hashable, _Held]]:
        """The idle users of a tenant, and the contents of their slots."""
        held = list(self._held.items())
        return [(user_of(holder), one) for holder, one in held if one.identity.owner == owner]

    def _restores(self, request: Request) -> Optional[Identity]:
        """Identity of the session to restore; None if the request may not reuse one, or was
        paused."""
        may_begin = request.params.reuses_prompt and request.saved_past is None
        return request.identity if self.reuse and may_begin else None

    def _has_room(self, held: _Held) -> bool:
        return self.store.has_room(self._runner.slot_bytes(len(held.token_ids)))

    def _copy_piece(self, done: list[int]) -> bool:
        """Copies one piece; returns whether there may be more."""
        if self._restoring:
            slot = next(iter(self._restoring))
            if self._restore_piece(self._restoring[slot]):
                del self._restoring[slot]
                done.append(slot)
            return True
        if self._saving is None:
            self._saving = self._next()
        if self._saving is None:
            return False
        self._save_piece(self._saving)
        return True

    def _restore_piece(self, one: _Restoring) -> bool:
        """Restores one piece; returns whether it was the last."""
        try:
            next(one.rest)
            return False
        except StopIteration:
            one.request.cached_tokens = one.request.computed_tokens = one.tokens
            self.store.restored(one.identity, one.tokens)
        except Exception:  # nothing counts as computed, so what was written is not read
            logger.exception("a session is ignored: it could not be copied into a slot")
            self.store.discard(one.identity)
        return True

    def _next(self) -> Optional[_Saving]:
        """The session to save next: one that is wanted, or the least recently used."""
        for user in [*self._wanted, *(self._unsaved if self.store.writes_behind else ())]:
            held = self._held[user]
            if self._wanted.get(user) or self._has_room(held):
                return _Saving(user, held, self._pieces(held))
            if user in self._wanted:  # the store has no room, and the slot is needed
                del self._wanted[user]
                self._unsaved.pop(user, None)
        return None

    def _pieces(self, held: _Held) -> Iterator[CacheBytes]:
        """The pieces of a slot; none without prefix caching, because they may be outdated."""
        if not self.reuse:
            return iter(())
        return self._runner.read_slot(held.slot, len(held.token_ids))

    def _save_piece(self, one: _Saving) -> None:
        try:
            one.pieces.append(next(one.rest))
            return
        except StopIteration:
            session = Session(one.held.token_ids, one.pieces)
            if one.user in self._unsaved:
                self.store.put(one.held.identity, session)
            for future in self._wanted.pop(one.user, []):
                future.set_result(session)
        except Exception as error:
            logger.exception("a session is not kept: it could not be copied out of its slot")
            for future in self._wanted.pop(one.user, []):
                future.set_exception(error)
        self._saving = None
        self._unsaved.pop(one.user, None)
