"""The mailbox between the tasks on the nodes and the driver, which takes the posts and leaves instructions."""

from __future__ import annotations

import threading
from typing import Any

from headtohead.study.run.cluster.messages import Instructions, Post, Reply

_MAX_BYTES = 2**28
"""Bytes of files that wait for the driver; a post that exceeds them is sent again later."""


class Mailbox:
    """Holds posts until the driver takes them. Its methods may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._posts: list[Post] = []
        self._bytes = 0
        self._offers: dict[str, Any] = {}
        self._instructions = Instructions()

    def post(self, post: Post) -> Reply:
        """Take the news of a task and return what it has to do."""
        with self._lock:
            left = self._instructions
            accepted = not (post.size and self._bytes) or self._bytes + post.size <= _MAX_BYTES
            if accepted:
                self._posts.append(post)
                self._bytes += post.size
            offers = {key: self._offers[key] for key in post.wanted if key in self._offers}
            return Reply(accepted, post.task in left.stop, left.seconds_left, left.every, offers)

    def exchange(self, instructions: Instructions) -> list[Post]:
        """Return the posts since the last call and keep the driver's instructions."""
        with self._lock:
            self._instructions = instructions
            self._offers |= instructions.offers
            for key in instructions.withdrawn:
                self._offers.pop(key, None)
            posts, self._posts, self._bytes = self._posts, [], 0
            return posts
